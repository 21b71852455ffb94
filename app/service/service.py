"""The one writer: every event and every query of the process goes through here, on the event loop's thread.

It holds the parts together over one index and one clock: app/service/registry.py (pods, sources, trust),
app/service/batches.py (events), app/service/owners.py (whom blocks are for), app/service/queries.py (matches),
app/service/fuzzy_queries.py (matches by content), app/service/dumps.py (all that is held) and app/service/live.py (what
happens). What they share is said there; what a caller needs is said here.

Nothing here blocks, and nothing but `tick` and `stats` takes longer than its input: `tick` does a bounded
slice (`sweep_visits_max` index entries and a few silent sources), `stats` a pass over the sources.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from app._native import PlainBatch
from app.config import Settings
from app.errors import InvalidInput
from app.events import BlockRemoved, BlockStored, Envelope, EventBatch, Tier
from app.fuzzy.fuzzy_index import FuzzyIndex
from app.index.interface import Index, list_in_slices, ticks
from app.index.prefix_index import TICK_MS, IndexLimits
from app.pods import Pod, PodSpec, SourceState
from app.service.batches import Batches, BatchResult
from app.service.dumps import Dumps
from app.service.fuzzy_queries import FuzzyQueries
from app.service.hints import HintBook
from app.service.live import LiveFeed
from app.service.owners import Owners
from app.service.queries import JsonAnswer, MatchQuery, MatchResult, Queries
from app.service.registry import PodListener, Registry
from app.service.saved_state import Adoption, SavedState, adopt, describe, index_digest
from app.service.scoring import TIER_LABELS

SILENCES_PER_TICK_MAX = 64  # resets of silent sources in one tick; the others follow in the next

NEVER_TICKS = 10 * 24 * 3600 * 1000 // TICK_MS  # where nothing expires, ages past ten days are not told apart

_SUMMED = (
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

SWEPT_A_PART = 512  # entries: a microsecond each where all are dead and the fuzzy index is awake


def index_limits(settings: Settings) -> IndexLimits:
    """The bounds of the index that belong to `settings`."""
    return IndexLimits(
        ttl_ticks=ticks(settings.ttl_s),
        contexts_max=settings.contexts_max,
        prefixes_per_context_max=settings.prefixes_per_context_max,
        prefixes_max=settings.prefixes_max,
        orphan_blocks_max=settings.orphan_blocks_max,
        speculative_blocks_max=settings.speculative_blocks_max,
        claims_max=settings.owner_claims_max,
        lists_all=settings.redis_url is not None,  # what comes from the log is chained to hashes
    )


class IndexerService:
    """All calls are synchronous, non-blocking and made from one thread. `clock` gives monotonic seconds.

    `contents` is the fuzzy index that `index` keeps in step; without one there are no fuzzy matches.
    """

    def __init__(
        self,
        settings: Settings,
        index: Index,
        *,
        clock: Callable[[], float],
        contents: FuzzyIndex | None = None,
    ) -> None:
        self._settings = settings
        self._index = index
        self._clock = clock
        self._started_s = clock()
        self._ticks_ahead = 0  # room for the ages of what is restored
        self._sweep_from_s = clock()
        self.live = LiveFeed(
            subscribers_max=settings.live_subscribers_max, queue_events_max=settings.live_queue_events_max
        )
        self._registry = Registry(settings, index, self.live, clock)
        self.owners = Owners(settings, index)
        self.hints = HintBook(settings, index)
        self._batches = Batches(
            settings, index, self._registry, self.owners, self.live, self.hints, now=self._now
        )
        self._queries = Queries(settings, index, self._registry, self.hints, clock=clock, now=self._now)
        self.fuzzy = FuzzyQueries(
            settings, index, contents, self._registry, self.owners, self._queries, now=self._now
        )
        self.dumps = Dumps(
            index,
            self._registry,
            self.hints,
            self.owners,
            now=self._now,
            dumps_max=settings.dumps_max,
        )

    # -- pods

    @property
    def pods(self) -> Mapping[str, Pod]:
        return self._registry.pods

    @property
    def listeners(self) -> list[PodListener]:
        return self._registry.listeners

    def check_spec(self, spec: PodSpec) -> None:
        """Raises what `register` would for what is wrong with the spec alone."""
        self._registry.check(spec)

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

        Returns the blocks that were forgotten. Raises UnknownPod; InvalidInput for another model or a rank
        that never spoke.
        """
        found = self._registry.find(pod)
        self._registry.check_model(found, model)
        if dp_rank is not None and dp_rank not in found.sources:
            raise InvalidInput(f"pod {pod!r} has no rank {dp_rank}", field="dp_rank")
        ids = [s.index_id for rank, s in found.sources.items() if dp_rank is None or rank == dp_rank]
        contexts: list[int | None] = [None]
        if lora is not None:
            contexts = [context.id for context in self._index.find_contexts(found.spec.model, lora)]
        before = sum(sum(self._index.blocks_by_tier(index_id)) for index_id in ids)
        for index_id in ids:
            for context in contexts:
                self._index.clear(index_id, tier=tier, context=context)
        return before - sum(sum(self._index.blocks_by_tier(index_id)) for index_id in ids)

    def blocks_by_tier(self, pod: str, dp_rank: int) -> Mapping[str, int]:
        """Tier label -> blocks held; {} for a rank that never spoke. Raises UnknownPod."""
        source = self._registry.find(pod).sources.get(dp_rank)
        if source is None:
            return {}
        return dict(zip(TIER_LABELS, self._index.blocks_by_tier(source.index_id), strict=True))

    # -- events

    def post(self, envelope: Envelope, batch: EventBatch) -> BatchResult:
        """A batch that came by HTTP: registers the pod on first contact, deduplicates by `seq`.

        The first `seq` of a source is taken as it is; one that was seen changes nothing, save 0 with another
        `digest` than before: then the engine restarted, and what it held is forgotten first. One below the last that
        is stamped (`batch.ts`) later than all that were applied is of another run, whose number 0 got lost: it
        changes nothing, and the source is degraded. One past the next says
        that batches were lost, and the source is degraded; so it is when the sender says that its picture is
        `incomplete`. For a pod that is followed `seq` is not looked at, since the numbers are its stream's, and what
        is said of the GPU tier beside that stream degrades the source.
        Raises, with nothing changed: InvalidInput for an unknown pod without a model and for another model
        than the pod's; LimitExceeded; BatchRejected when events were sent and every one of them is bad.
        """
        return self._batches.post(envelope, batch)

    def post_plain(
        self,
        pod: str,
        plain: PlainBatch,
        *,
        model: str | None,
        dp_rank: int,
        seq: int | None,
        lora: str | None,
        ts: float | None = None,
    ) -> BatchResult | None:
        """`post` of a batch that was read natively and is the usual next one of a known source: in one call of the
        index. None: it is not, nothing has changed, and `post` says what it is."""
        return self._batches.post_plain(pod, plain, model=model, dp_rank=dp_rank, seq=seq, lora=lora, ts=ts)

    def listing(self) -> Iterator[None]:
        """What `post` of a batch with `PrefixesStored` would do first, in one go, where it was not done before: in
        slices of 0.3 ms."""
        return list_in_slices(self._index, self._now)

    def check(self, envelope: Envelope, batch: EventBatch) -> None:
        """Raises what `post` would, and changes nothing."""
        self._batches.check(envelope, batch)

    def check_sender(self, envelope: Envelope) -> None:
        """Raises what `post` would for whatever batch of this sender."""
        self._batches.check_sender(envelope)

    def apply(
        self, pod: str, dp_rank: int, batch: EventBatch, *, seq: int | None, digest: int | None = None
    ) -> BatchResult:
        """The next batch of a stream whose order and completeness the caller vouches for.

        `digest` is any hash of what was received that is the same in every process. Raises UnknownPod, and
        LimitExceeded for a rank past `dp_ranks_max`.
        """
        return self._batches.apply(pod, dp_rank, batch, seq=seq, digest=digest)

    def position(self, pod: str, dp_rank: int) -> tuple[int, int] | None:
        """(number, digest) of the newest batch of a followed stream that is in the picture; None: there is
        none. Raises UnknownPod."""
        source = self._registry.find(pod).sources.get(dp_rank)
        if source is None or source.last_seq is None or source.last_digest is None:
            return None
        return source.last_seq, source.last_digest

    def chain_of(
        self, pod: str, dp_rank: int, model: str, lora: str | None, event: BlockStored
    ) -> int | None:
        """The prefix that applying `event` now would chain its blocks to, for one that has a parent; None: they
        would wait for it."""
        known = self.pods.get(pod)
        source = None if known is None else known.sources.get(dp_rank)
        context = self._index.context_ids(model, lora).get(event.block_size)
        if source is None or context is None or event.parent_block_hash is None:
            return None
        return self._index.chain_of(
            source.index_id,
            context,
            tier=event.tier,
            group=event.group,
            parent=event.parent_block_hash,
            now=self._now(),
        )

    def waiting_blocks(self, pod: str, dp_rank: int) -> int:
        """Blocks of a rank that wait for their parent; 0 for one that is not known."""
        known = self.pods.get(pod)
        source = None if known is None else known.sources.get(dp_rank)
        return 0 if source is None else self._index.orphan_blocks(source.index_id)

    def remove_everywhere(
        self,
        model: str,
        lora: str | None,
        event: BlockRemoved,
        *,
        concerns: Callable[[str], bool] = lambda _pod: True,
    ) -> int:
        """Removal without a source: one copy of each block leaves every pod of the model that names it.

        Pods that serve another adapter than `lora` only are left alone, and those that it does not concern. Returns
        the copies removed. Only right where pods agree on their engine hashes. O(sources of the model).
        """
        removed = 0
        for pod in self.pods.values():
            if pod.spec.model != model or pod.spec.lora not in (None, lora) or not concerns(pod.spec.name):
                continue
            for source in pod.sources.values():
                copies = self._index.remove(
                    source.index_id,
                    tier=event.tier,
                    group=event.group,
                    engine_hashes=event.block_hashes,
                    now=self._now(),
                ).removed_blocks
                source.removed_blocks += copies
                removed += copies
        return removed

    def reset_source(self, pod: str, dp_rank: int, *, restarted: bool) -> None:
        """Everything this rank held is gone (engine restart, silence past the deadline). O(1).

        Its last sequence number and learned block size are forgotten, and it is no longer degraded.
        """
        source = self._registry.source(pod, dp_rank)
        source.restarts += restarted
        self._registry.reset(source, "the engine restarted" if restarted else "its deadline is past")

    def set_away(self, cause: str, *, concerns: Callable[[str], bool]) -> None:
        """What is told of the pods that it concerns does not come through now: their ranks are degraded for as long.
        "" when it does again. O(ranks)."""
        self._registry.set_away([pod for name, pod in self.pods.items() if concerns(name)], cause)

    def doubt(self, cause: str) -> None:
        """Batches may have been lost on their way here: what cannot show by numbers that none of its own was, is
        degraded. O(ranks)."""
        for pod in self.pods.values():
            if pod.spec.zmq_endpoint is not None:
                continue
            for source in pod.sources.values():
                if source.last_seq is None and source.last_event_at_s is not None:
                    self._registry.lose(source, cause)

    def ask_before_silence(self, ask: Callable[[str, int], None]) -> None:
        """From now on nobody is reset for silence on this process's clock alone: `ask(pod, rank)` is told, once
        after each batch, and whoever decides calls `silence`."""
        self._registry.on_silent = ask

    def silence(self, pod: str, dp_rank: int) -> None:
        """A rank that posts by HTTP is silent past its deadline: it holds nothing."""
        self._registry.silence(self._registry.source(pod, dp_rank))

    def set_source_state(
        self, pod: str, dp_rank: int, state: SourceState, *, gaps: int = 0, replays: int = 0, cause: str = ""
    ) -> None:
        """What the ingest learned of a stream; `gaps` and `replays` are added to the counters.

        DEGRADED says that batches were lost for good, and nothing of the stream, which may go on with its replay: it
        stays until a reset, or a clear that makes the picture true (see app/service/registry.py). LIVE says only that the
        stream is whole from here on.
        """
        source = self._registry.source(pod, dp_rank)
        source.gaps += gaps
        source.replays += replays
        if state is SourceState.DEGRADED:
            self._registry.lose(source, cause)
        else:
            self._registry.set_stream(source, state, cause)

    # -- queries

    def match(self, query: MatchQuery) -> MatchResult:
        """Raises InvalidInput for buffers that do not fit."""
        return self._queries.match(query)

    def match_json(self, query: MatchQuery) -> JsonAnswer | None:
        """`match` as the text of the HTTP contract, for queries without `include_hashes`.

        None for an answer with hints: `match` has them.
        """
        return self._queries.match_json(query)

    def prefix_hashes(
        self,
        model: str,
        lora: str | None,
        token_ids: bytes,
        extra_keys: tuple[bytes, ...] | None,
        block_size: int | None,
    ) -> bytes:
        """uint64, little-endian, one a full block of `unit(model, lora, block_size)` tokens."""
        return self._queries.prefix_hashes(model, lora, token_ids, extra_keys, block_size)

    def unit(self, model: str, lora: str | None, block_size: int | None) -> int:
        """Tokens a block that answers count in: what is given, else the smallest size known of the model."""
        return self._queries.unit(model, lora, block_size)

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
        (`speculative_ttl_s_max`, `dp_ranks_max`).
        """
        return self._queries.add_speculative(pod, dp_rank, model, lora, prefix_hashes, ttl_s, block_size)

    # -- across processes (app/service/saved_state.py)

    def describe(self, *, configured: frozenset[str], at_s: float) -> SavedState:
        """What a snapshot says beside the index: as of now, `at_s` in Unix time."""
        return describe(
            self._registry,
            self._index,
            self.owners,
            configured=configured,
            at_s=at_s,
            now=self._now(),
            clock=self._clock,
        )

    def adopt(self, state: SavedState, *, configured: frozenset[str], at_s: float) -> Adoption:
        """Registers what a snapshot knows; its index frames belong into what is returned.

        For a service that holds nothing yet.
        """
        self._ticks_ahead = ticks(self._settings.ttl_s) or NEVER_TICKS
        return adopt(
            self._registry,
            self._index,
            self.owners,
            state,
            configured=configured,
            at_s=at_s,
            now=self._now(),
        )

    # -- time and figures

    def tick(self) -> None:
        """Bounded slice of expiry, sweeping and deadlines; called from a timer."""
        for _ in self.tick_parts():
            pass

    def tick_parts(self) -> Iterator[None]:
        """`tick`, in parts of half a millisecond at the most."""
        if self._clock() >= self._sweep_from_s:
            left = self._settings.sweep_visits_max
            while left > 0:
                swept = self._index.sweep(self._now(), min(left, SWEPT_A_PART))
                left -= max(swept.visited, SWEPT_A_PART)
                if swept.idle:
                    # Nothing hangs on it: what is dead or expired is hidden already, sweeping only gives memory back.
                    self._sweep_from_s = self._clock() + self._settings.sweep_pause_s
                    break
                yield
        if not self.hints.is_empty:
            self.hints.sweep(self._now())
        self._registry.reset_silent(SILENCES_PER_TICK_MAX)

    @property
    def is_at_rest(self) -> bool:
        """The next `tick` has nothing to sweep."""
        return self._clock() < self._sweep_from_s and self.hints.is_empty

    def stats(self) -> dict[str, Any]:
        """Plain values: `sources` by state, `events` by type and `totals` of the pods registered now;
        `rejected` by reason and `queries` since the start.
        """
        sources = [source for pod in self.pods.values() for source in pod.sources.values()]
        states = Counter(source.state for source in sources)
        return {
            "uptime_s": self._clock() - self._started_s,
            "digest": index_digest(self._registry, self._index),
            "pods": len(self.pods),
            "sources": {state.value: states[state] for state in SourceState},
            "events": dict(sum((source.events for source in sources), Counter[str]())),
            "rejected": dict(self._batches.rejected),
            "totals": {name: sum(getattr(source, name) for source in sources) for name in _SUMMED},
            "queries": {
                "matches": self._queries.matches,
                "matches_hit": self._queries.matches_hit,
                "tokens_asked": self._queries.tokens_asked,
                "tokens_matched": self._queries.tokens_matched,
            },
            "streams": {
                "dumps_running": self.dumps.running,
                "dumps_refused": self.dumps.refused,
                "live_subscribers": self.live.subscribers,
                "live_refused": self.live.refused,
                "live_dropped": self.live.dropped,
            },
            "contexts": [dataclasses.asdict(context) for context in self._index.contexts()],
            "index": dataclasses.asdict(self._index.stats()),
        }

    def _now(self) -> int:
        return self._ticks_ahead + int((self._clock() - self._started_s) * 1000) // TICK_MS
