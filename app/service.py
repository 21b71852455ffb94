"""The one writer: every event and every query of the process goes through here, on the event loop's thread.

Events. A batch is sifted before anything is changed: an event whose block size contradicts its source is
rejected, the others are applied in order. Batches come in two ways. `post` is for whoever speaks by HTTP: it
registers the pod, leaves out batches that were seen, notices gaps, and refuses a batch of which nothing can
be used. `apply` is for a stream whose order and completeness the caller vouches for: it never refuses.

Queries. A model can have contexts of several block sizes; a query asks them all and app/scoring.py merges the
answers. Where a block size is not given, it is the smallest one known of (model, lora): the size of its
contexts, or else of the registered pods of the model, or else `block_size_default`. Hashes are chained from a
seed that has the block size in it, so hashes of one size are unknown in every other; `prefix_hashes`, `match`
and `add_speculative` choose alike.

Nothing here blocks, and nothing but `tick` takes longer than its input: `tick` does a bounded slice.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from app.batches import Sifted, apply_events, sift
from app.config import Settings
from app.errors import BatchRejected, InvalidInput, LimitExceeded
from app.events import EventBatch, RejectedEvent, Tier
from app.index.interface import Index
from app.index.prefix_index import TICK_MS, ContextInfo, Depths, IndexLimits
from app.pods import Pod, PodSpec, Source, SourceState
from app.registry import PodListener, Registry
from app.scoring import TIER_LABELS, MatchRow, build_row, merge_depths, rank_rows

__all__ = [
    "BatchResult",
    "IndexerService",
    "MatchQuery",
    "MatchResult",
    "MatchRow",
    "PodListener",
    "index_limits",
]

SILENCES_PER_TICK_MAX = 64  # resets of silent sources in one tick; the others follow in the next


@dataclasses.dataclass(frozen=True, slots=True)
class BatchResult:
    """What a batch did. `orphans` are blocks of it that wait for their parent."""

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


class MatchResult(msgspec.Struct, frozen=True):
    model: str
    lora: str | None
    block_size: int
    tokens: int
    blocks: int
    matches: tuple[MatchRow, ...]  # best first
    prefix_hashes: bytes | None  # uint64, little-endian


def index_limits(settings: Settings) -> IndexLimits:
    """The bounds of the index that belong to `settings`; times are rounded up to whole ticks."""
    return IndexLimits(
        ttl_ticks=_ticks(settings.ttl_s),
        contexts_max=settings.contexts_max,
        prefixes_per_context_max=settings.prefixes_per_context_max,
        orphan_blocks_max=settings.orphan_blocks_max,
        speculative_blocks_max=settings.speculative_blocks_max,
    )


class IndexerService:
    """All calls are synchronous, non-blocking and made from one thread. `clock` gives monotonic seconds.

    `rejected` counts events by reason, `matches` are queries, `matches_hit` those with a confirmed block,
    `tokens_asked` and `tokens_matched` (by the best row) their sizes: all since the start, for the metrics.
    """

    def __init__(self, settings: Settings, index: Index, *, clock: Callable[[], float]) -> None:
        self.rejected: Counter[str] = Counter()
        self.matches = 0
        self.matches_hit = 0
        self.tokens_asked = 0
        self.tokens_matched = 0
        self._settings = settings
        self._index = index
        self._clock = clock
        self._started_s = clock()
        self._registry = Registry(settings, index, clock)

    # -- pods

    @property
    def pods(self) -> Mapping[str, Pod]:
        return self._registry.pods

    @property
    def listeners(self) -> list[PodListener]:
        return self._registry.listeners

    def register(self, spec: PodSpec) -> Pod:
        """Idempotent. A pod whose endpoints, model, adapter or block size change starts empty.

        Raises InvalidInput, or LimitExceeded (`pods_max`, `dp_ranks_max`).
        """
        return self._registry.register(spec)

    def pod(self, name: str) -> Pod:
        """Raises UnknownPod."""
        return self._registry.find(name)

    def drop_pod(self, name: str) -> None:
        """Raises UnknownPod."""
        self._registry.drop(name)

    def remove_blocks(
        self, pod: str, *, model: str | None, lora: str | None, dp_rank: int | None, tier: Tier | None
    ) -> int:
        """Forgets what a pod holds, where given only of an adapter ("" is the bare model), a rank, a tier.

        Returns the blocks that were forgotten. Raises UnknownPod; InvalidInput for another model or an
        unknown rank.
        """
        found = self._registry.find(pod)
        _check_model(found, model)
        if dp_rank is not None and dp_rank not in found.sources:
            raise InvalidInput(f"pod {pod!r} has no rank {dp_rank}", field="dp_rank")
        sources = [s for rank, s in found.sources.items() if dp_rank is None or rank == dp_rank]
        contexts: list[int | None] = [None]
        if lora is not None:
            contexts = [context.id for context in self._index.find_contexts(found.spec.model, lora)]
        before = sum(sum(self._index.blocks_by_tier(source.index_id)) for source in sources)
        for source in sources:
            for context in contexts:
                self._index.clear(source.index_id, tier=tier, context=context)
        return before - sum(sum(self._index.blocks_by_tier(source.index_id)) for source in sources)

    def blocks_by_tier(self, pod: str, dp_rank: int) -> Mapping[str, int]:
        """Tier label -> blocks held; {} for a rank that never spoke. Raises UnknownPod."""
        source = self._registry.find(pod).sources.get(dp_rank)
        if source is None:
            return {}
        return dict(zip(TIER_LABELS, self._index.blocks_by_tier(source.index_id), strict=True))

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
        """A batch that came by HTTP: registers the pod on first contact, deduplicates by `seq`.

        `lora` is the adapter of events that name none. The first `seq` of a source is taken as it is; one
        that was seen changes nothing; one past the next says that batches were lost, and the source is
        degraded. Raises, with nothing changed: InvalidInput for an unknown pod without a model and for
        another model than the pod's; LimitExceeded; BatchRejected when the batch has rejected events and none
        that is well-formed.
        """
        known = self.pods.get(pod)
        if known is None and not model:
            raise InvalidInput(
                f"pod {pod!r} is not registered: its first batch must name the model", field="model"
            )
        if known is not None:
            _check_model(known, model)
        self._registry.check_rank(dp_rank)
        source = known.sources.get(dp_rank) if known is not None else None
        if source is not None and _seen(source, seq):
            source.duplicates += 1
            return BatchResult(duplicate=True)
        sifted = sift(batch, _block_size(known, source))
        if sifted.is_useless:
            self._count_rejected(source, sifted.rejected)
            raise BatchRejected(sifted.rejected)
        if known is None:
            known = self._registry.register(PodSpec(name=pod, model=model or ""))
        source = self._registry.source(pod, dp_rank)
        if known.spec.zmq_endpoint is None and source.stream is SourceState.DOWN:
            self._registry.set_stream(source, SourceState.LIVE, "it spoke again")
            self._registry.lose(source, "it spoke again after what it held was forgotten for its silence")
        if seq is not None and source.last_seq is not None and seq > source.last_seq + 1:
            source.gaps += 1
            self._registry.lose(source, f"batches {source.last_seq + 1} to {seq - 1} never came")
        return self._apply(known, source, sifted, seq, lora)

    def apply(self, pod: str, dp_rank: int, batch: EventBatch, *, seq: int | None) -> BatchResult:
        """The next batch of a stream whose order and completeness the caller vouches for.

        Raises UnknownPod, and LimitExceeded for a rank past `dp_ranks_max`.
        """
        source = self._registry.source(pod, dp_rank)
        found = self._registry.find(pod)
        return self._apply(found, source, sift(batch, source.block_size), seq, None)

    def remove_everywhere(self, model: str, lora: str | None, engine_hashes: bytes) -> int:
        """Removal without a source: one GPU copy of each block leaves every pod of the model that names it.

        Returns the copies removed. Only right where pods agree on their engine hashes. O(sources of the
        model).
        """
        removed = 0
        for pod in self.pods.values():
            if pod.spec.model == model and pod.spec.lora in (None, lora or None):
                for source in pod.sources.values():
                    result = self._index.remove(
                        source.index_id, tier=Tier.GPU, group=0, engine_hashes=engine_hashes, now=self._now()
                    )
                    source.removed_blocks += result.removed_blocks
                    removed += result.removed_blocks
        return removed

    def reset_source(self, pod: str, dp_rank: int, *, restarted: bool) -> None:
        """Everything this rank held is gone (engine restart, silence past the deadline). O(1).

        Its last sequence number and learned block size are forgotten, and it is no longer degraded.
        """
        source = self._registry.source(pod, dp_rank)
        source.restarts += restarted
        self._registry.reset(source, "the engine restarted" if restarted else "its deadline is past")

    def set_source_state(
        self, pod: str, dp_rank: int, state: SourceState, *, gaps: int = 0, replays: int = 0, cause: str = ""
    ) -> None:
        """What the ingest learned of a stream; `gaps` and `replays` are added to the counters.

        DEGRADED says that batches were lost for good: it stays until a reset, or a clear that makes the
        picture true (see app/registry.py), and LIVE says only that the stream is whole from here on.
        """
        source = self._registry.source(pod, dp_rank)
        source.gaps += gaps
        source.replays += replays
        if state is SourceState.DEGRADED:
            self._registry.lose(source, cause)
            self._registry.set_stream(source, SourceState.LIVE, cause)
        else:
            self._registry.set_stream(source, state, cause)

    # -- queries

    def match(self, query: MatchQuery) -> MatchResult:
        """Raises InvalidInput for buffers that do not fit."""
        count = _check_buffers(query)
        contexts = self._index.find_contexts(query.model, query.lora)
        if query.block_size is not None:
            contexts = [context for context in contexts if context.block_size == query.block_size]
        unit = self._unit(query.model, query.block_size, contexts)
        tokens = count * unit if query.token_ids is None else count
        reaches = merge_depths(self._depths(query, contexts, unit))
        now_s = self._clock()
        rows = []
        for index_id, reach in reaches.items():
            source = self._registry.by_index_id(index_id)
            assert source is not None, "the index answers for sources of the registry only"
            if query.pods is None or source.pod in query.pods:
                rows.append(build_row(source, reach, unit=unit, tokens=tokens, now_s=now_s))
        ranked = rank_rows(rows)
        self.matches += 1
        self.tokens_asked += tokens
        if ranked and ranked[0].matched_blocks:
            self.matches_hit += 1
            self.tokens_matched += ranked[0].matched_tokens
        hashes = None
        if query.include_hashes:
            hashes = query.prefix_hashes
            if query.token_ids is not None:
                hashes = self._index.prefix_hashes(
                    query.model, query.lora, unit, query.token_ids, query.extra_keys
                )
        return MatchResult(query.model, query.lora, unit, tokens, tokens // unit, ranked, hashes)

    def prefix_hashes(
        self,
        model: str,
        lora: str | None,
        token_ids: bytes,
        extra_keys: tuple[bytes, ...] | None,
        block_size: int | None,
    ) -> bytes:
        """uint64, little-endian, one a full block of `unit(model, lora, block_size)` tokens."""
        return self._index.prefix_hashes(
            model, lora, self.unit(model, lora, block_size), token_ids, extra_keys
        )

    def unit(self, model: str, lora: str | None, block_size: int | None) -> int:
        """Tokens a block that an answer counts in: what is given, else the smallest size known."""
        return self._unit(model, block_size, self._index.find_contexts(model, lora))

    def add_speculative(
        self,
        pod: str,
        dp_rank: int,
        model: str,
        lora: str | None,
        prefix_hashes: bytes,
        ttl_s: float,
        block_size: int | None,
    ) -> int:
        """A router says that it sent these blocks to a rank. Returns how many are marked (held ones are not).

        Raises UnknownPod; InvalidInput for another model than the pod's; LimitExceeded
        (`speculative_ttl_s_max`).
        """
        found = self._registry.find(pod)
        _check_model(found, model)
        if not ttl_s > 0:
            raise InvalidInput(f"ttl_s {ttl_s} is not positive", field="ttl_s")
        if ttl_s > self._settings.speculative_ttl_s_max:
            bound = f"speculative_ttl_s_max = {self._settings.speculative_ttl_s_max}"
            raise LimitExceeded(f"ttl_s {ttl_s} is longer than {bound}", bound="speculative_ttl_s_max")
        source = self._registry.source(pod, dp_rank)
        now = self._now()
        context = self._index.context(model, lora, self.unit(model, lora, block_size), now)
        return self._index.add_speculative(context, source.index_id, prefix_hashes, _ticks(ttl_s), now)

    def stats(self) -> dict[str, Any]:
        """Plain values; `sources` by state, `events` and `totals` over the pods that are registered now."""
        sources = [source for pod in self.pods.values() for source in pod.sources.values()]
        return {
            "uptime_s": self._clock() - self._started_s,
            "pods": len(self.pods),
            "sources": {state.value: sum(s.state is state for s in sources) for state in SourceState},
            "events": dict(sum((source.events for source in sources), Counter[str]())),
            "rejected": dict(self.rejected),
            "totals": {
                name: sum(getattr(source, name) for source in sources)
                for name in (
                    "batches",
                    "duplicates",
                    "ignored",
                    "stored_blocks",
                    "removed_blocks",
                    "unknown_blocks",
                    "orphans",
                    "orphans_dropped",
                    "gaps",
                    "replays",
                    "restarts",
                )
            },
            "queries": {
                "matches": self.matches,
                "matches_hit": self.matches_hit,
                "tokens_asked": self.tokens_asked,
                "tokens_matched": self.tokens_matched,
            },
            "contexts": [dataclasses.asdict(context) for context in self._index.contexts()],
            "index": dataclasses.asdict(self._index.stats()),
        }

    # -- time

    def tick(self) -> None:
        """Bounded slice of expiry, sweeping and deadlines; called from a timer."""
        self._index.sweep(self._now(), self._settings.sweep_visits_max)
        self._registry.reset_silent(SILENCES_PER_TICK_MAX)

    def _now(self) -> int:
        return int((self._clock() - self._started_s) * 1000) // TICK_MS

    # -- how

    def _apply(
        self, pod: Pod, source: Source, sifted: Sifted, seq: int | None, lora: str | None
    ) -> BatchResult:
        tally = apply_events(
            self._index,
            self._registry,
            source,
            sifted,
            lora=lora or pod.spec.lora,
            now=self._now(),
            count_copies=self._settings.count_copies,
        )
        source.batches += 1
        source.ignored += sifted.ignored
        source.last_seq = source.last_seq if seq is None else seq
        self._count_rejected(source, sifted.rejected)
        self._registry.hear(source)
        return BatchResult(
            accepted=len(sifted.events) + sifted.ignored,
            stored_blocks=tally.stored_blocks,
            removed_blocks=tally.removed_blocks,
            orphans=min(tally.orphan_blocks, self._index.orphan_blocks(source.index_id))
            if tally.orphan_blocks
            else 0,
            rejected=sifted.rejected,
        )

    def _count_rejected(self, source: Source | None, rejected: tuple[RejectedEvent, ...]) -> None:
        self.rejected.update(event.reason for event in rejected)
        if source is not None:
            source.rejected += len(rejected)

    def _unit(self, model: str, block_size: int | None, known: list[ContextInfo]) -> int:
        if block_size is not None:
            if block_size < 1:
                raise InvalidInput(f"block_size {block_size} is not positive", field="block_size")
            return block_size
        if known:
            return min(context.block_size for context in known)
        pods = [pod for pod in self.pods.values() if pod.spec.model == model]
        sizes = [size for pod in pods for source in pod.sources.values() if (size := source.block_size)]
        return min(sizes, default=self._settings.block_size_default)

    def _depths(
        self, query: MatchQuery, contexts: list[ContextInfo], unit: int
    ) -> Iterator[tuple[int, list[Depths]]]:
        """The answer of each context that the query can be asked of, beside its block size."""
        now = self._now()
        for context in contexts:
            size = context.block_size
            if query.prefix_hashes is not None:
                if size == unit:
                    yield size, self._index.match_hashes(context.id, query.prefix_hashes, now)
            elif query.token_ids is not None:
                keys = query.extra_keys
                if keys is not None and size != unit:
                    # Keys are given for blocks of `unit` tokens: only the first block's (a salt) are the same
                    # for the first block of another size.
                    if any(keys[1:]):
                        continue
                    keys = keys[:1]
                yield size, self._index.match_tokens(context.id, query.token_ids, keys, now)


def _ticks(seconds: float) -> int:
    return math.ceil(seconds * 1000 / TICK_MS)


def _seen(source: Source, seq: int | None) -> bool:
    return seq is not None and source.last_seq is not None and seq <= source.last_seq


def _block_size(pod: Pod | None, source: Source | None) -> int | None:
    """Of the GPU tier of a source that may not exist yet."""
    if source is not None:
        return source.block_size
    return pod.spec.block_size if pod is not None else None


def _check_model(pod: Pod, model: str | None) -> None:
    if model is not None and model != pod.spec.model:
        raise InvalidInput(f"pod {pod.spec.name!r} serves {pod.spec.model!r}, not {model!r}", field="model")


def _check_buffers(query: MatchQuery) -> int:
    """Tokens, or prefix hashes, of the query."""
    assert (query.token_ids is None) != (query.prefix_hashes is None), (
        "a query has tokens or hashes, and not both"
    )
    if query.token_ids is not None:
        if len(query.token_ids) % 4:
            raise InvalidInput("token_ids must be whole uint32 values", field="token_ids")
        return len(query.token_ids) // 4
    assert query.prefix_hashes is not None
    if len(query.prefix_hashes) % 8:
        raise InvalidInput("prefix_hashes must be whole uint64 values", field="prefix_hashes")
    return len(query.prefix_hashes) // 8
