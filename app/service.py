"""The one writer: every event and every query of the process goes through here, on the event loop's thread.

INTERFACE DRAFT (bodies follow)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from app.events import EventBatch, RejectedEvent, Tier
from app.pods import Pod, PodSpec, SourceState


class PodListener(Protocol):
    """Told when pods come and go (the ZMQ ingest follows them)."""

    def pod_added(self, spec: PodSpec) -> None: ...
    def pod_removed(self, name: str) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class BatchResult:
    """What a batch did. `orphans` counts blocks that wait for their parent."""

    accepted: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    orphans: int = 0
    rejected: tuple[RejectedEvent, ...] = ()
    duplicate: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class MatchQuery:
    """Exactly one of `token_ids` (uint32, little-endian) and `prefix_hashes` (uint64, little-endian) is set.

    `extra_keys` are canonical encodings, one a block (fewer are padded with none).
    """

    model: str
    lora: str | None = None
    token_ids: bytes | None = None
    prefix_hashes: bytes | None = None
    extra_keys: tuple[bytes, ...] | None = None
    block_size: int | None = None
    pods: frozenset[str] | None = None
    include_hashes: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class MatchRow:
    pod: str
    dp_rank: int
    matched_blocks: int
    matched_tokens: int
    reusable_tokens: int
    percent: float
    tiers: Mapping[str, int]  # tier label -> depth in blocks, cumulative from fast to slow
    speculative_blocks: int  # depth when blocks announced by AddPrefix count too; >= matched_blocks
    state: SourceState
    last_event_age_s: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class MatchResult:
    model: str
    lora: str | None
    block_size: int
    tokens: int
    blocks: int
    matches: tuple[MatchRow, ...]  # best first
    prefix_hashes: bytes | None  # uint64, little-endian


class IndexerService:
    """All calls are synchronous, non-blocking and made from one thread."""

    def __init__(self, settings: Any, *, clock: Callable[[], float], metrics: Any = None) -> None: ...

    listeners: list[PodListener]
    pods: Mapping[str, Pod]

    # -- pods
    def register(self, spec: PodSpec) -> Pod: ...  # idempotent; a changed spec re-registers and clears
    def pod(self, name: str) -> Pod: ...  # raises UnknownPod
    def drop_pod(self, name: str) -> None: ...  # raises UnknownPod
    def remove_blocks(
        self,
        pod: str,
        *,
        model: str | None,
        lora: str | None,
        dp_rank: int | None,
        tier: Tier | None,
    ) -> int: ...
    def blocks_by_tier(self, pod: str, dp_rank: int) -> Mapping[str, int]: ...

    # -- events
    def post(
        self,
        pod: str,
        batch: EventBatch,
        *,
        model: str | None,
        dp_rank: int,
        seq: int | None,
        lora: str | None,
    ) -> BatchResult:
        """A batch that came by HTTP: registers the pod on first contact, deduplicates by `seq`."""

    def apply(self, pod: str, dp_rank: int, batch: EventBatch, *, seq: int | None) -> BatchResult:
        """The next batch of a stream whose order and completeness the caller vouches for (ZMQ ingest, replication)."""

    def reset_source(self, pod: str, dp_rank: int, *, restarted: bool) -> None:
        """Everything this rank held is gone (engine restart, silence past the deadline). O(1)."""

    def set_source_state(
        self, pod: str, dp_rank: int, state: SourceState, *, gaps: int = 0, replays: int = 0, cause: str = ""
    ) -> None: ...

    # -- queries
    def match(self, query: MatchQuery) -> MatchResult: ...
    def prefix_hashes(
        self,
        model: str,
        lora: str | None,
        token_ids: bytes,
        extra_keys: tuple[bytes, ...] | None,
        block_size: int | None,
    ) -> bytes: ...
    def add_speculative(
        self,
        pod: str,
        dp_rank: int,
        model: str,
        lora: str | None,
        prefix_hashes: bytes,
        ttl_s: float,
        block_size: int | None,
    ) -> int: ...
    def stats(self) -> dict[str, Any]: ...

    # -- time
    def tick(self) -> None:
        """Bounded slice of expiry, sweeping and deadlines; called from a timer."""


def rank_rows(rows: Sequence[MatchRow]) -> tuple[MatchRow, ...]: ...
