"""Pods: what is said of one, and how its ranks are."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from app.schemas.fields import (
    DP_RANK_MAX,
    NAME_CHARS_MAX,
    Adapter,
    BlockSize,
    Body,
    DpRank,
    Endpoint,
    Name,
    StateLabel,
    TierLabel,
)


class PodRequest(Body):
    """What the operator says about a pod. Rank r is found at each endpoint's port + r."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "m",
                    "block_size": 16,
                    "zmq_endpoint": "tcp://10.0.0.7:5557",
                    "replay_endpoint": "tcp://10.0.0.7:5558",
                }
            ]
        }
    )

    model: Name
    lora: Adapter | None = None
    block_size: BlockSize | None = Field(
        None, description="Tokens a block; taken from the first event when absent."
    )
    zmq_endpoint: Endpoint | None = Field(
        None, description="Where rank 0 publishes; none: its events come by HTTP."
    )
    replay_endpoint: Endpoint | None = Field(None, description="Where rank 0 replays what was missed.")
    topic: Annotated[str, Field(max_length=NAME_CHARS_MAX)] = ""
    dp_size: int = Field(1, ge=1, le=DP_RANK_MAX + 1, description="Data-parallel ranks.")
    metrics_url: Endpoint | None = Field(
        None,
        description="Where its Prometheus metrics are, if `/v1/route` is to know its load.",
        examples=["http://10.0.0.7:8000/metrics"],
    )


class RankResponse(Body):
    """One rank of a pod."""

    dp_rank: int
    state: StateLabel
    cause: str = Field(description="Why it is in this state, as last told; empty while nothing was.")
    last_seq: int | None = Field(description="Newest sequence number that a match already sees.")
    last_event_age_s: float | None
    blocks: dict[str, int] = Field(description="Blocks held, by tier.")
    gaps: int
    replays: int
    restarts: int
    orphans: int
    rejected: int


class PodResponse(Body):
    """A registered pod."""

    pod: str
    model: str
    lora: str | None
    block_size: int | None
    zmq_endpoint: str | None
    replay_endpoint: str | None
    topic: str
    dp_size: int
    metrics_url: str | None
    discovered_by: str | None = Field(None, description="Place of discovery that keeps it registered.")
    ranks: list[RankResponse]


class PodsResponse(Body):
    """Every registered pod, by name."""

    pods: list[PodResponse]


class RemoveFields(Body):
    """Which of a pod's blocks to forget; everything where nothing is said."""

    model: Name | None = None
    lora: Adapter | None = None
    dp_rank: DpRank | None = None
    tier: TierLabel | None = None


class RemovedResponse(Body):
    """How many blocks were forgotten."""

    removed_blocks: int
