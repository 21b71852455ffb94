"""Batches of events: sift (app/service/sifting.py), apply what is left (app/service/effects.py), and keep the books of
their source.

Batches come in two ways. `post` is for whoever speaks by HTTP: it registers the pod, leaves out batches that
were seen, notices gaps, and refuses a batch of which nothing can be used. What is posted of a pod that is followed
has no number among those of its stream, and makes its rank doubtful where it speaks of the GPU tier. `apply` is for
a stream whose order and completeness the caller vouches for: what it cannot use it counts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import msgspec

from app._native import PlainBatch
from app.config import Settings
from app.errors import BatchRejected, InvalidInput
from app.events import AllBlocksCleared, Envelope, Event, EventBatch, RejectedEvent, Tier
from app.index.interface import Index
from app.pods import PodSpec, Source, SourceState
from app.service.effects import Effects
from app.service.hints import HintBook
from app.service.live import LiveFeed
from app.service.owners import Owners
from app.service.registry import Registry
from app.service.sifting import Sifted, sift

logger = logging.getLogger(__name__)


class BatchResult(msgspec.Struct, frozen=True):
    """What a batch did. `orphans` are blocks of it that wait for their parent."""

    accepted: int = 0
    ignored: int = 0  # of the accepted: they say nothing about a reusable prefix
    stored_blocks: int = 0
    removed_blocks: int = 0
    orphans: int = 0
    rejected: tuple[RejectedEvent, ...] = ()
    duplicate: bool = False


# What a posted batch is, before anything is changed because of it: its source (None: the rank never spoke), whether
# the engine restarted, and the sifted events (None: it was seen before).
_Examined = tuple[Source | None, bool, Sifted | None]


class Batches:
    """Part of the service. `now` gives the index's ticks; `rejected` counts events by reason."""

    def __init__(
        self,
        settings: Settings,
        index: Index,
        registry: Registry,
        owners: Owners,
        live: LiveFeed,
        hints: HintBook,
        *,
        now: Callable[[], int],
    ) -> None:
        self.rejected: Counter[str] = Counter()
        self._settings = settings
        self._index = index
        self._registry = registry
        self._owners = owners
        self._live = live
        self._hints = hints
        self._now = now
        self._effects = Effects(settings, index, registry, owners, hints, now=now)

    def post(self, envelope: Envelope, batch: EventBatch) -> BatchResult:
        """See IndexerService.post."""
        is_beside = self._is_followed(envelope.pod)
        seq = None if is_beside else envelope.seq  # beside a stream the numbers are the stream's
        source, restarted, sifted = self._examine(envelope, batch, seq)
        if sifted is None:
            assert source is not None
            source.duplicates += 1
            if _is_of_another_run(source, seq, batch.ts):
                self._registry.lose(
                    source,
                    f"number {seq} came again, stamped later than all up to number {source.last_seq}: "
                    "the engine may have restarted, and its number 0 been lost",
                )
            return BatchResult(duplicate=True)
        if sifted.is_useless:
            self._count_rejected(source, sifted.rejected)
            raise BatchRejected(sifted.rejected)
        owner = self._owners.number(envelope.owner)
        if envelope.pod not in self._registry.pods:
            self._registry.register(PodSpec(name=envelope.pod, model=envelope.model or ""))
        source = self._registry.source(envelope.pod, envelope.dp_rank)
        if restarted:
            source.restarts += 1
            self._registry.reset(source, "the engine restarted: another batch came as number 0")
        if seq is not None and source.last_seq is not None and seq > source.last_seq + 1:
            source.gaps += 1
            self._registry.lose(source, f"batches {source.last_seq + 1} to {seq - 1} never came")
        if envelope.incomplete:
            self._registry.lose(source, "its sender says that the picture is not whole")
        # A dump ends with a number and no event, and the engine's own may follow.
        if seq == 0 and not _is_empty(batch):
            source.first_digest = envelope.digest
        result = self._apply(source, sifted, seq, envelope.lora, owner, ts=batch.ts)
        if is_beside and any(_is_of_gpu(event) for event in sifted.events):
            self._registry.lose(source, "a batch was posted beside its stream, which does not know of it")
        return result

    def check(self, envelope: Envelope, batch: EventBatch) -> None:
        """See IndexerService.check."""
        seq = None if self._is_followed(envelope.pod) else envelope.seq
        source, _, sifted = self._examine(envelope, batch, seq)
        if sifted is not None and sifted.is_useless:
            self._count_rejected(source, sifted.rejected)
            raise BatchRejected(sifted.rejected)

    def check_sender(self, envelope: Envelope) -> None:
        """See IndexerService.check_sender."""
        known = self._registry.pods.get(envelope.pod)
        if known is None:
            self._registry.check_name(envelope.pod)
        if known is None and not envelope.model:
            detail = f"pod {envelope.pod!r} is not registered: its first batch must name the model"
            raise InvalidInput(detail, field="model")
        if known is not None:
            self._registry.check_model(known, envelope.model)
        self._registry.check_rank(envelope.dp_rank)

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
        """See IndexerService.post_plain."""
        known = self._registry.pods.get(pod)
        source = None if known is None else known.sources.get(dp_rank)
        if known is None or source is None or not self._is_usual(known.spec, source, model, seq):
            return None
        events, stores, tier, block_size, own_lora, offloads = plain.kind()
        context = None
        if stores:
            context = self._usual_context(known.spec, source, tier, block_size, own_lora or lora)
            if context is None:
                return None
        stored, removed, orphans, unknown = self._index.apply_plain(
            plain,
            source.index_id,
            context or 0,
            now=self._now(),
            count_copies=self._settings.count_copies,
        )
        if stores:
            source.events["BlockStored"] += stores
            self._effects.report_drops()  # also of blocks that had no room to wait, which `orphans` does not count
        if events > stores:
            source.events["BlockRemoved"] += events - stores
        if offloads and not source.offloads:
            self._registry.offload(source)
        source.unknown_blocks += unknown
        return self._book(source, seq, stored, removed, orphans, accepted=events, ts=ts)

    def _is_followed(self, pod: str) -> bool:
        known = self._registry.pods.get(pod)
        return known is not None and known.spec.zmq_endpoint is not None

    def _is_usual(self, spec: PodSpec, source: Source, model: str | None, seq: int | None) -> bool:
        """A batch of this source changes nothing but blocks and counters, as far as can be said without its events."""
        if spec.zmq_endpoint is not None or (model is not None and model != spec.model):
            return False
        if seq is not None and (source.last_seq is None or seq != source.last_seq + 1):
            return False
        return source.stream is SourceState.LIVE and self._hints.is_empty

    def _usual_context(
        self, spec: PodSpec, source: Source, tier: int, block_size: int, lora: str | None
    ) -> int | None:
        """Of blocks as this source has stored them before."""
        own = source.block_size
        size = own if tier == Tier.GPU else source.chunk_sizes.get(Tier(tier))
        if own is None or block_size != size or block_size % own:
            return None
        return self._index.context_ids(spec.model, lora or spec.lora).get(block_size)

    def _examine(self, envelope: Envelope, batch: EventBatch, seq: int | None) -> _Examined:
        self.check_sender(envelope)
        known = self._registry.pods.get(envelope.pod)
        source = known.sources.get(envelope.dp_rank) if known is not None else None
        restarted = source is not None and _restarted(source, batch, seq, envelope.digest)
        if source is not None and _seen(source, seq) and not restarted:
            return source, False, None
        declared = known.spec.block_size if known is not None else None
        if source is None or restarted:
            sifted = sift(batch, declared, {})
        else:
            sifted = sift(batch, source.block_size, source.chunk_sizes)
        return source, restarted, sifted

    def apply(
        self, pod: str, dp_rank: int, batch: EventBatch, *, seq: int | None, digest: int | None = None
    ) -> BatchResult:
        """See IndexerService.apply."""
        source = self._registry.source(pod, dp_rank)
        source.last_digest = digest
        return self._apply(source, sift(batch, source.block_size, source.chunk_sizes), seq, None)

    def _apply(
        self,
        source: Source,
        sifted: Sifted,
        seq: int | None,
        lora: str | None,
        owner: int = 0,
        *,
        ts: float | None = None,
    ) -> BatchResult:
        self._registry.welcome_back(source)
        if source.block_size != sifted.block_size:
            self._registry.set_block_size(source, sifted.block_size)
        if sifted.chunk_sizes is not source.chunk_sizes:
            self._effects.learn_chunk_sizes(source, sifted.chunk_sizes)
        tally = self._effects.apply(source, sifted.events, lora, owner)
        source.ignored += sifted.ignored
        self._count_rejected(source, sifted.rejected)
        accepted = len(sifted.events) + sifted.ignored
        return self._book(
            source,
            seq,
            tally.stored_blocks,
            tally.removed_blocks,
            tally.orphan_blocks,
            accepted=accepted,
            ignored=sifted.ignored,
            rejected=sifted.rejected,
            ts=ts,
        )

    def _book(
        self,
        source: Source,
        seq: int | None,
        stored_blocks: int,
        removed_blocks: int,
        orphan_blocks: int,
        *,
        accepted: int,
        ignored: int = 0,
        rejected: tuple[RejectedEvent, ...] = (),
        ts: float | None = None,
    ) -> BatchResult:
        """The books of a batch that was applied."""
        source.batches += 1
        source.stored_blocks += stored_blocks
        source.removed_blocks += removed_blocks
        source.orphans += orphan_blocks
        if seq is not None:
            source.last_seq = seq
            if ts is None or source.newest_ts is None or ts > source.newest_ts:
                source.newest_ts = ts
        self._registry.hear(source)
        waiting = self._index.orphan_blocks(source.index_id) if orphan_blocks else 0
        result = BatchResult(
            accepted=accepted,
            ignored=ignored,
            stored_blocks=stored_blocks,
            removed_blocks=removed_blocks,
            orphans=min(orphan_blocks, waiting),
            rejected=rejected,
        )
        if self._live.is_heard:
            self._tell(source, seq, result)
        return result

    def _tell(self, source: Source, seq: int | None, result: BatchResult) -> None:
        self._live.tell(
            "batch",
            pod=source.pod,
            dp_rank=source.dp_rank,
            seq=seq,
            accepted=result.accepted,
            stored_blocks=result.stored_blocks,
            removed_blocks=result.removed_blocks,
            orphans=result.orphans,
            rejected=len(result.rejected),
        )

    def _count_rejected(self, source: Source | None, rejected: tuple[RejectedEvent, ...]) -> None:
        if not rejected:
            return
        news = next((event for event in rejected if event.reason not in self.rejected), None)
        self.rejected.update(event.reason for event in rejected)
        if source is None:
            return
        before, source.rejected = source.rejected, source.rejected + len(rejected)
        # Each reason once, and the 1st, 2nd, 4th, 8th ... of a source: nobody answers an engine, so the log says it.
        if news is not None or before.bit_length() != source.rejected.bit_length():
            self._log_rejected(source, news or rejected[0])

    def _log_rejected(self, source: Source, event: RejectedEvent) -> None:
        logger.warning(
            "source %s rank %d: event %d of a batch is skipped (%s): %s; %d of this source in all",
            source.pod,
            source.dp_rank,
            event.index,
            event.reason,
            event.detail,
            source.rejected,
            extra={"pod": source.pod, "dp_rank": source.dp_rank},
        )


def _is_of_gpu(event: Event) -> bool:
    return isinstance(event, AllBlocksCleared) or event.tier is Tier.GPU


def _is_empty(batch: EventBatch) -> bool:
    return not (batch.events or batch.rejected or batch.ignored)


def _restarted(source: Source, batch: EventBatch, seq: int | None, digest: int | None) -> bool:
    """Another batch comes as number 0 than the one that did before, or than none: the publisher counts anew."""
    if seq != 0 or digest is None or source.last_seq is None or digest == source.first_digest:
        return False
    # Not the end of a dump, taken again: a number without an event and without an engine's stamp.
    return source.last_seq > 0 or batch.ts is not None or not _is_empty(batch)


def _seen(source: Source, seq: int | None) -> bool:
    return seq is not None and source.last_seq is not None and seq <= source.last_seq


def _is_of_another_run(source: Source, seq: int | None, ts: float | None) -> bool:
    """A batch that was seen cannot be one of those: it is stamped later than all of them.

    Not one with the last number: its sender may not have got the answer, and have stamped it anew. The latest stamp
    and not the last one counts, since clocks are set back; there is none behind a batch without a stamp.
    """
    if seq is None or ts is None or source.newest_ts is None:
        return False
    return seq != source.last_seq and ts > source.newest_ts
