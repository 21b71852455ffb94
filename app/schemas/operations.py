"""How the process goes, and what to dump of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.schemas.fields import PODS_ASKED_MAX, Body, Name


class DumpFields(Body):
    """What to dump; everything where nothing is said."""

    pods: Annotated[list[Name], Field(max_length=PODS_ASKED_MAX)] | None = Field(
        None, description="Only these pods."
    )


class HealthResponse(Body):
    """The process answers."""

    status: Literal["ok"]
    version: str


class PlaceResponse(Body):
    """A place that knows pods: a file, a DNS name, a label selector of Kubernetes."""

    place: str
    state: Literal["starting", "working", "failing"] = Field(description="Failing: its last picture is kept.")
    cause: str = Field(description="Why; empty when it works.")
    seen_age_s: float | None = Field(description="Seconds since its last picture.")
    pods: dict[str, int] = Field(description="`registered`, `waiting`, `vanished` and `refused` ones.")
    waiting: dict[str, str] = Field(description="Pods that are not registered yet, and why.")
    looks: dict[str, int]
    changes: dict[str, int]


class StatsResponse(BaseModel):
    """Figures since the start; more may be added."""

    model_config = ConfigDict(extra="allow", frozen=True)

    uptime_s: float
    digest: str = Field(description="Of who holds which prefix on which tier, whatever the order it came in.")
    pods: int
    sources: dict[str, int] = Field(description="Ranks by state.")
    events: dict[str, int] = Field(description="Events applied, by type, of the pods that are registered.")
    rejected: dict[str, int] = Field(description="Events skipped, by reason.")
    queries: dict[str, int]
    index: dict[str, int]
    discovery: list[PlaceResponse] = Field([], description="How each place of discovery goes.")
