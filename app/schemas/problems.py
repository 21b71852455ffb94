"""What is answered instead, when a request is refused or fails."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from app.schemas.fields import Body


class Fault(Body):
    """One fault of a request."""

    field: str = Field(description="Its place as a dotted path; empty when it is the whole.")
    detail: str


class Problem(BaseModel):
    """RFC 9457 problem object."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str
    title: str
    status: int
    detail: str
    errors: list[Fault]
    bound: str | None = Field(None, description="The setting whose bound was met.")
    request_id: str | None = Field(
        None, description="The `X-Request-ID` of the answer; the indexer's log has it too."
    )
