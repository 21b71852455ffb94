"""Pods and their sources: who may speak, and how far each one's picture can be trusted.

One `Source` is one ordered event stream, a (pod, rank). Only the service writes to these records; ingest
reports to the service, and the API reads. State, last sequence number and age go with every match, so that a
router can fall back.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter

from app.events import Tier


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
    metrics_url: str | None = None  # where its Prometheus metrics are read for its load
    discovered_by: str | None = None  # the place of discovery that keeps it registered
    incarnation: str = (
        ""  # of its engine, where the place can tell; another one is another engine, and starts empty
    )


@dataclasses.dataclass(slots=True)
class Source:
    """One (pod, rank): its place in the index, its trust state and its counters since registration."""

    pod: str
    dp_rank: int
    index_id: int  # the source's number inside the index
    stream: SourceState = SourceState.LIVE  # LIVE, CATCHING_UP or DOWN: what is known of the connection
    incomplete: bool = False  # batches or blocks were lost for good
    stream_cause: str = ""  # why `stream` is what it is, as last told; "" while nothing was
    loss_cause: str = ""  # why it is incomplete
    away_cause: str = ""  # why nobody knows what was told since; "" while what is told comes through
    offloads: bool = False  # has spoken of a tier other than the GPU's
    cleared_loss: str = ""  # what a clear made up for, as long as it has not
    last_seq: int | None = None  # newest sequence number that a match already sees
    last_digest: int | None = None  # of the batch `last_seq` of a followed stream
    first_digest: int | None = None  # of posted batch 0
    newest_ts: float | None = None  # the latest stamp of numbered posts; None behind one without
    last_event_at_s: float | None = None  # on the service's clock
    block_size: int | None = None  # of the GPU tier, in tokens: declared, or learned from the first event
    chunk_sizes: dict[Tier, int] = dataclasses.field(
        default_factory=dict
    )  # of other tiers, in tokens: learned
    gaps: int = 0
    replays: int = 0
    restarts: int = 0
    orphans: int = 0  # blocks that had to wait for their parent
    orphans_dropped: int = 0  # blocks of them that were given up for want of room
    rejected: int = 0  # events
    ignored: int = 0  # events
    batches: int = 0
    duplicates: int = 0  # batches
    events: Counter[str] = dataclasses.field(default_factory=Counter)  # applied, by type
    stored_blocks: int = 0
    removed_blocks: int = 0
    unknown_blocks: int = 0  # blocks named in a removal or a placeholder that this source does not hold

    @property
    def state(self) -> SourceState:
        if self.stream is SourceState.LIVE and (self.incomplete or self.away_cause):
            return SourceState.DEGRADED
        return self.stream

    @property
    def cause(self) -> str:
        """Why the state is what it is; "" while nothing was told."""
        if self.state is SourceState.DEGRADED:
            return self.away_cause or self.loss_cause
        return self.stream_cause


@dataclasses.dataclass(slots=True)
class Pod:
    """A registered pod with its sources by rank."""

    spec: PodSpec
    sources: dict[int, Source] = dataclasses.field(default_factory=dict)
