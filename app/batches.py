"""Batches of events: sift, then apply what is left in order, and keep the books of their source.

Sifting changes nothing, so that a batch of which nothing can be used can be refused as a whole. It finds what
the codec cannot know: on the GPU tier every block of a source has one size, the declared one or that of its
first event. Offload tiers have a size of their own: LMCache stores chunks of 256 tokens beside engine blocks of
16. The unfinished end of a prompt it publishes as a smaller chunk, with its length for a block size; no longer
prompt ever finds that one, so a tier's size is the largest that its source has shown, and smaller ones are
ignored. Each would otherwise be a context of its own, asked by every query.

Batches come in two ways. `post` is for whoever speaks by HTTP: it registers the pod, leaves out batches that
were seen, notices gaps, and refuses a batch of which nothing can be used. What is posted of a pod that is followed
has no number among those of its stream, and makes its rank doubtful where it speaks of the GPU tier. `apply` is for
a stream whose order and completeness the caller vouches for: what it cannot use it counts.
"""

from __future__ import annotations

import array
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeGuard

import msgspec

from app._native import PlainBatch
from app.config import Settings
from app.errors import BatchRejected, InvalidInput
from app.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlocksHashed,
    BlockStored,
    Event,
    EventBatch,
    PrefixesStored,
    RejectedEvent,
    Tier,
)
from app.hints import HintBook, Holder, read_hints
from app.index.interface import Index
from app.live import LiveFeed
from app.owners import Owners, read_owners
from app.pods import PodSpec, Source, SourceState
from app.registry import Registry


class BatchResult(msgspec.Struct, frozen=True):
    """What a batch did. `orphans` are blocks of it that wait for their parent."""

    accepted: int = 0
    ignored: int = 0  # of the accepted: they say nothing about a reusable prefix
    stored_blocks: int = 0
    removed_blocks: int = 0
    orphans: int = 0
    rejected: tuple[RejectedEvent, ...] = ()
    duplicate: bool = False


class Sifted(msgspec.Struct, frozen=True):
    """The events that can be applied, those that the codec or `sift` rejected, and the sizes learned."""

    events: tuple[Event, ...]
    rejected: tuple[RejectedEvent, ...]
    ignored: int
    block_size: int | None
    chunk_sizes: Mapping[Tier, int]

    @property
    def is_useless(self) -> bool:
        """Something was sent, and all of it is bad."""
        return bool(self.rejected) and not self.events and not self.ignored


def sift(batch: EventBatch, block_size: int | None, chunk_sizes: Mapping[Tier, int]) -> Sifted:
    """`block_size` is the one of the source's GPU tier, None when it is not known yet; `chunk_sizes` are those of
    its other tiers, as far as they are known."""
    stores = [event for event in batch.events if _tells_size(event)]
    if block_size is None:
        block_size = next((event.block_size for event in stores if event.tier is Tier.GPU), None)
    # No generator: nearly every batch ends here.
    if not [event for event in stores if event.tier is not Tier.GPU or event.block_size != block_size]:
        return Sifted(batch.events, batch.rejected, batch.ignored, block_size, chunk_sizes)
    chunk_sizes = dict(chunk_sizes)
    for stored in stores:
        if stored.tier is not Tier.GPU and stored.block_size % (block_size or 1) == 0:
            chunk_sizes[stored.tier] = max(stored.block_size, chunk_sizes.get(stored.tier, 0))
    events: list[Event] = []
    rejected = list(batch.rejected)
    for position, event in zip(batch.positions, batch.events, strict=True):
        if _tells_size(event):
            if event.tier is not Tier.GPU and event.block_size != chunk_sizes.get(event.tier):
                continue
            if event.tier is Tier.GPU and event.block_size != block_size:
                detail = (
                    f"block_size {event.block_size} does not match {block_size}, "
                    "which was declared for this source or came first"
                )
                rejected.append(RejectedEvent(index=position, reason="block_size", detail=detail))
                continue
        events.append(event)
    ignored = batch.ignored + len(batch.events) + len(batch.rejected) - len(events) - len(rejected)
    rejected.sort(key=lambda event: event.index)
    return Sifted(tuple(events), tuple(rejected), ignored, block_size, chunk_sizes)


def _tells_size(event: Event) -> TypeGuard[BlockStored | BlocksHashed | PrefixesStored]:
    """It says what its blocks are, and so how long; a placeholder does not."""
    if isinstance(event, BlockStored):
        return bool(event.token_ids)
    return isinstance(event, BlocksHashed | PrefixesStored)


# What a posted batch is, before anything is changed because of it: its source (None: the rank never spoke), whether
# the engine restarted, and the sifted events (None: it was seen before).
_Examined = tuple[Source | None, bool, Sifted | None]


_KINDS: Mapping[type[Event], str] = {BlocksHashed: BlockStored.__name__}  # counted under another name


@dataclasses.dataclass(slots=True)
class _Tally:
    owner: int  # of the batch; 0 is nobody
    stored_blocks: int = 0
    removed_blocks: int = 0
    orphan_blocks: int = 0  # had to wait when they came; some may have been chained since


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

    def post(
        self,
        pod: str,
        batch: EventBatch,
        *,
        model: str | None,
        dp_rank: int,
        seq: int | None,
        lora: str | None,
        digest: int | None = None,
        incomplete: bool = False,
        owner: str | None = None,
    ) -> BatchResult:
        """See IndexerService.post."""
        is_beside = self._is_followed(pod)
        if is_beside:
            seq = None  # the numbers are its stream's
        source, restarted, sifted = self._examine(pod, batch, model, dp_rank, seq, digest)
        if sifted is None:
            assert source is not None
            source.duplicates += 1
            return BatchResult(duplicate=True)
        if sifted.is_useless:
            self._count_rejected(source, sifted.rejected)
            raise BatchRejected(sifted.rejected)
        owner_number = self._owners.number(owner)
        if pod not in self._registry.pods:
            self._registry.register(PodSpec(name=pod, model=model or ""))
        source = self._registry.source(pod, dp_rank)
        if restarted:
            source.restarts += 1
            self._registry.reset(source, "the engine restarted: another batch came as number 0")
        if seq is not None and source.last_seq is not None and seq > source.last_seq + 1:
            source.gaps += 1
            self._registry.lose(source, f"batches {source.last_seq + 1} to {seq - 1} never came")
        if incomplete:
            self._registry.lose(source, "its sender says that the picture is not whole")
        # A dump ends with a number and no event, and the engine's own may follow.
        if seq == 0 and (sifted.events or sifted.ignored or sifted.rejected):
            source.first_digest = digest
        result = self._apply(source, sifted, seq, lora, owner_number)
        if is_beside and any(_is_of_gpu(event) for event in sifted.events):
            self._registry.lose(source, "a batch was posted beside its stream, which does not know of it")
        return result

    def check(
        self,
        pod: str,
        batch: EventBatch,
        *,
        model: str | None,
        dp_rank: int,
        seq: int | None,
        digest: int | None,
    ) -> None:
        """See IndexerService.check."""
        if self._is_followed(pod):
            seq = None
        source, _, sifted = self._examine(pod, batch, model, dp_rank, seq, digest)
        if sifted is not None and sifted.is_useless:
            self._count_rejected(source, sifted.rejected)
            raise BatchRejected(sifted.rejected)

    def check_sender(self, pod: str, model: str | None, dp_rank: int) -> None:
        """See IndexerService.check_sender."""
        known = self._registry.pods.get(pod)
        if known is None and not model:
            detail = f"pod {pod!r} is not registered: its first batch must name the model"
            raise InvalidInput(detail, field="model")
        if known is not None:
            self._registry.check_model(known, model)
        self._registry.check_rank(dp_rank)

    def post_plain(
        self,
        pod: str,
        plain: PlainBatch,
        *,
        model: str | None,
        dp_rank: int,
        seq: int | None,
        lora: str | None,
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
            self._report_drops()  # also of blocks for which there was no room to wait, which `orphans` does not count
        if events > stores:
            source.events["BlockRemoved"] += events - stores
        source.offloads |= offloads
        source.unknown_blocks += unknown
        return self._book(source, seq, stored, removed, orphans, accepted=events)

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

    def _examine(
        self,
        pod: str,
        batch: EventBatch,
        model: str | None,
        dp_rank: int,
        seq: int | None,
        digest: int | None,
    ) -> _Examined:
        self.check_sender(pod, model, dp_rank)
        known = self._registry.pods.get(pod)
        source = known.sources.get(dp_rank) if known is not None else None
        restarted = source is not None and _restarted(source, seq, digest)
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
        self, source: Source, sifted: Sifted, seq: int | None, lora: str | None, owner: int = 0
    ) -> BatchResult:
        self._registry.welcome_back(source)
        if source.block_size != sifted.block_size:
            self._registry.set_block_size(source, sifted.block_size)
        if sifted.chunk_sizes is not source.chunk_sizes:
            self._learn_chunk_sizes(source, sifted.chunk_sizes)
        tally = self._apply_events(source, sifted.events, lora, owner)
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
    ) -> BatchResult:
        """The books of a batch that was applied."""
        source.batches += 1
        source.stored_blocks += stored_blocks
        source.removed_blocks += removed_blocks
        source.orphans += orphan_blocks
        source.last_seq = source.last_seq if seq is None else seq
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

    def _learn_chunk_sizes(self, source: Source, chunk_sizes: Mapping[Tier, int]) -> None:
        """What was stored while a smaller size passed for the tier's was an unfinished end."""
        for tier, size in chunk_sizes.items():
            before = source.chunk_sizes.get(tier, size)
            source.chunk_sizes[tier] = size
            if before != size:
                for context in self._index.contexts():
                    if context.block_size == before:
                        self._index.clear(source.index_id, tier=tier, context=context.id)

    def _apply_events(
        self, source: Source, events: tuple[Event, ...], lora: str | None, owner: int
    ) -> _Tally:
        spec = self._registry.find(source.pod).spec
        lora = lora or spec.lora
        now = self._now()
        tally = _Tally(owner)
        for event in events:
            source.events[_KINDS.get(type(event)) or type(event).__name__] += 1
            if isinstance(event, BlockStored):
                self._store(source, event, tally, model=spec.model, lora=event.lora or lora, now=now)
            elif isinstance(event, BlocksHashed):
                self._store_hashed(source, event, tally, model=spec.model, now=now)
            elif isinstance(event, PrefixesStored):
                self._store_prefixes(source, event, tally, model=spec.model, now=now)
            elif isinstance(event, BlockRemoved):
                self._remove(source, event, tally, now=now)
            else:
                self._report_drops()  # what was lost before the clear must not degrade what comes after it
                self._registry.clear_gpu(source)
        self._report_drops()
        self._hints.after_batch(source.index_id, now)
        return tally

    def _store(
        self, source: Source, event: BlockStored, tally: _Tally, *, model: str, lora: str | None, now: int
    ) -> None:
        self._before_store(source, event, now)
        if event.token_ids:
            context = self._index.context(model, lora, event.block_size, now)
            result = self._index.store(
                source.index_id,
                context,
                tier=event.tier,
                group=event.group,
                engine_hashes=event.block_hashes,
                parent=event.parent_block_hash,
                token_ids=event.token_ids,
                extra_keys=event.extra_keys,
                now=now,
                count_copies=self._settings.count_copies,
                owner=tally.owner,
            )
            self._keep_hint(source, context, event, now)
        else:
            result = self._index.place(
                source.index_id,
                tier=event.tier,
                group=event.group,
                engine_hashes=event.block_hashes,
                now=now,
                count_copies=self._settings.count_copies,
                owner=tally.owner,
            )
        source.offloads |= event.tier is not Tier.GPU
        source.unknown_blocks += result.unknown_blocks
        tally.stored_blocks += result.stored_blocks
        tally.orphan_blocks += result.orphan_blocks

    def _before_store(
        self, source: Source, event: BlockStored | BlocksHashed | PrefixesStored, now: int
    ) -> None:
        if not self._hints.is_empty:
            self._hints.before_store(_holder(source, event), event.block_hashes, now)

    def _keep_hint(self, source: Source, context: int, event: BlockStored | BlocksHashed, now: int) -> None:
        if event.metadata is not None and self._hints.is_on:
            last = int.from_bytes(event.block_hashes[-8:], "little")
            self._hints.put(_holder(source, event), context, last, event.metadata, now)

    def _store_hashed(
        self, source: Source, event: BlocksHashed, tally: _Tally, *, model: str, now: int
    ) -> None:
        context = self._index.context(model, event.lora, event.block_size, now)
        self._before_store(source, event, now)
        result = self._index.store_hashed(
            source.index_id,
            context,
            tier=event.tier,
            group=event.group,
            engine_hashes=event.block_hashes,
            chain_from=event.chain_from,
            prefix_hashes=event.prefix_hashes,
            contents=event.contents,
            now=now,
            count_copies=self._settings.count_copies,
            owner=tally.owner,
        )
        self._keep_hint(source, context, event, now)
        source.offloads |= event.tier is not Tier.GPU
        tally.stored_blocks += result.stored_blocks

    def _store_prefixes(
        self, source: Source, event: PrefixesStored, tally: _Tally, *, model: str, now: int
    ) -> None:
        counted = self._settings.count_copies
        self._before_store(source, event, now)
        context = self._index.context(model, event.lora, event.block_size, now)
        result = self._index.store_prefixes(
            source.index_id,
            context,
            tier=event.tier,
            group=event.group,
            engine_hashes=event.block_hashes,
            prefix_hashes=event.prefix_hashes,
            copies=event.copies if counted else None,
            now=now,
            count_copies=counted,
            owner=tally.owner,
        )
        if event.hints is not None and self._hints.is_on:
            holder = _holder(source, event)
            for block, metadata in read_hints(event.hints):
                self._hints.put(holder, context, block, metadata, now)
        if event.owners is not None and self._settings.fuzzy:
            self._claim_prefixes(source, event, context, now)
        source.offloads |= event.tier is not Tier.GPU
        tally.stored_blocks += result.stored_blocks

    def _claim_prefixes(self, source: Source, event: PrefixesStored, context: int, now: int) -> None:
        """Whom a dump says the blocks are for: stored once more for each owner, which changes nothing else."""
        names = array.array("Q", event.block_hashes)
        prefixes = array.array("Q", event.prefix_hashes)
        copies = None if event.copies is None else array.array("Q", event.copies)
        for owner, blocks in read_owners(event.owners or b""):
            places = [place for place, name in enumerate(names) if name in blocks]
            if not places:
                continue
            if not self._owners.has_room_for(owner):
                self._owners.refused += 1
                continue
            self._index.store_prefixes(
                source.index_id,
                context,
                tier=event.tier,
                group=event.group,
                engine_hashes=array.array("Q", [names[place] for place in places]).tobytes(),
                prefix_hashes=array.array("Q", [prefixes[place] for place in places]).tobytes(),
                copies=None
                if copies is None or not self._settings.count_copies
                else array.array("Q", [copies[place] for place in places]).tobytes(),
                now=now,
                count_copies=self._settings.count_copies,
                owner=self._owners.number(owner),
            )

    def _remove(self, source: Source, event: BlockRemoved, tally: _Tally, *, now: int) -> None:
        result = self._index.remove(
            source.index_id, tier=event.tier, group=event.group, engine_hashes=event.block_hashes, now=now
        )
        source.offloads |= event.tier is not Tier.GPU
        source.unknown_blocks += result.unknown_blocks
        tally.removed_blocks += result.removed_blocks

    def _report_drops(self) -> None:
        for index_id, blocks in self._index.orphan_drops():
            source = self._registry.by_index_id(index_id)
            if source is not None:
                source.orphans_dropped += blocks
                cause = f"{blocks} blocks waited for a parent and orphan_blocks_max left no room"
                self._registry.lose(source, cause)

    def _count_rejected(self, source: Source | None, rejected: tuple[RejectedEvent, ...]) -> None:
        if not rejected:
            return
        self.rejected.update(event.reason for event in rejected)
        if source is not None:
            source.rejected += len(rejected)


def _holder(source: Source, event: BlockStored | BlocksHashed | PrefixesStored) -> Holder:
    return Holder(source.index_id, event.tier, event.group)


def _is_of_gpu(event: Event) -> bool:
    return isinstance(event, AllBlocksCleared) or event.tier is Tier.GPU


def _restarted(source: Source, seq: int | None, digest: int | None) -> bool:
    """Another batch comes as number 0 than the one that did before, or than none: the publisher counts anew."""
    return seq == 0 and digest is not None and source.last_seq is not None and digest != source.first_digest


def _seen(source: Source, seq: int | None) -> bool:
    return seq is not None and source.last_seq is not None and seq <= source.last_seq
