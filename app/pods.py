"""Pods and their sources: who may speak, and how far each one's picture can be trusted.

One `Source` is one ordered event stream, a (pod, rank). Only the service writes to these records; ingest reports to
the service, and the API reads. State, last sequence number and age go with every match, so that a router can fall back.
"""

from __future__ import annotations

import dataclasses
import enum


class SourceState(enum.StrEnum):
    """How far the picture of a source can be trusted."""

    LIVE = "live"  # every batch since the source began, or since its last clear, has been applied
    CATCHING_UP = "catching_up"  # a replay is under way
    DEGRADED = "degraded"  # batches or blocks were lost for good; true again after a clear or a restart
    DOWN = "down"  # the stream is disconnected; what it held is kept until the deadline


@dataclasses.dataclass(frozen=True, slots=True)
class PodSpec:
    """What the operator (or the first event) says about a pod.

    `zmq_endpoint` and `replay_endpoint` are those of rank 0; rank r is found at port + r.
    `block_size` is in tokens; None means: take it from the first event.
    """

    name: str
    model: str
    lora: str | None = None
    block_size: int | None = None
    zmq_endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""
    dp_size: int = 1


@dataclasses.dataclass(slots=True)
class Source:
    """One (pod, rank): its place in the index, its trust state and its counters since registration."""

    pod: str
    dp_rank: int
    index_id: int  # the source's number inside the index
    state: SourceState = SourceState.LIVE
    last_seq: int | None = None  # newest sequence number that a match already sees
    last_event_at_s: float | None = None  # on the service's clock
    block_size: int | None = None  # of the GPU tier, in tokens: declared, or learned from the first event
    gaps: int = 0
    replays: int = 0
    restarts: int = 0
    orphans: int = 0
    rejected: int = 0
    down_since_s: float | None = None


@dataclasses.dataclass(slots=True)
class Pod:
    """A registered pod with its sources by rank."""

    spec: PodSpec
    sources: dict[int, Source] = dataclasses.field(default_factory=dict)
