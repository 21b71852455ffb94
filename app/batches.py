"""What a batch of events does to the index: sift it first, then apply what is left, in order.

Sifting changes nothing, so that a batch of which nothing can be used can be refused as a whole. It finds what
the codec cannot know: on the GPU tier every block of a source has one size, the declared one or that of its
first event. Offload tiers are free of that: LMCache stores chunks of 256 tokens beside engine blocks of 16.
"""

from __future__ import annotations

import dataclasses

from app.events import BlockRemoved, BlockStored, Event, EventBatch, RejectedEvent, Tier
from app.index.interface import Index
from app.pods import Source
from app.registry import Registry


@dataclasses.dataclass(frozen=True, slots=True)
class Sifted:
    """The events that can be applied, those that the codec or `sift` rejected, and the size learned."""

    events: tuple[Event, ...]
    rejected: tuple[RejectedEvent, ...]
    ignored: int
    block_size: int | None

    @property
    def is_useless(self) -> bool:
        """Something was sent, and all of it is bad."""
        return bool(self.rejected) and not self.events and not self.ignored


@dataclasses.dataclass(slots=True)
class Tally:
    stored_blocks: int = 0
    removed_blocks: int = 0
    orphan_blocks: int = 0  # had to wait when they came; some may have been chained since


def sift(batch: EventBatch, block_size: int | None) -> Sifted:
    """`block_size` is the one of the source's GPU tier; None when it is not known yet."""
    events: list[Event] = []
    rejected = list(batch.rejected)
    for position, event in zip(batch.positions, batch.events, strict=True):
        if isinstance(event, BlockStored) and event.tier is Tier.GPU and event.token_ids:
            if block_size is None:
                block_size = event.block_size
            if event.block_size != block_size:
                detail = f"block_size {event.block_size} does not match {block_size}, the size of this source"
                rejected.append(RejectedEvent(index=position, reason="block_size", detail=detail))
                continue
        events.append(event)
    rejected.sort(key=lambda event: event.index)
    return Sifted(tuple(events), tuple(rejected), batch.ignored, block_size)


def apply_events(
    index: Index,
    registry: Registry,
    source: Source,
    sifted: Sifted,
    *,
    lora: str | None,
    now: int,
    count_copies: bool,
) -> Tally:
    """Applies the events in order; `lora` is the adapter of those that name none."""
    model = registry.find(source.pod).spec.model
    source.block_size = sifted.block_size
    tally = Tally()
    for event in sifted.events:
        source.events[type(event).__name__] += 1
        if isinstance(event, BlockStored):
            _store(index, source, event, tally, model=model, lora=lora, now=now, count_copies=count_copies)
        elif isinstance(event, BlockRemoved):
            _remove(index, source, event, tally, now=now)
        else:
            _report_drops(
                index, registry
            )  # what was lost before the clear must not degrade what comes after it
            registry.clear_gpu(source)
    _report_drops(index, registry)
    source.stored_blocks += tally.stored_blocks
    source.removed_blocks += tally.removed_blocks
    source.orphans += tally.orphan_blocks
    return tally


def _store(
    index: Index,
    source: Source,
    event: BlockStored,
    tally: Tally,
    *,
    model: str,
    lora: str | None,
    now: int,
    count_copies: bool,
) -> None:
    if event.token_ids:
        result = index.store(
            source.index_id,
            index.context(model, event.lora or lora, event.block_size, now),
            tier=event.tier,
            group=event.group,
            engine_hashes=event.block_hashes,
            parent=event.parent_block_hash,
            token_ids=event.token_ids,
            extra_keys=event.extra_keys,
            now=now,
            count_copies=count_copies,
        )
    else:
        result = index.place(
            source.index_id,
            tier=event.tier,
            group=event.group,
            engine_hashes=event.block_hashes,
            now=now,
            count_copies=count_copies,
        )
    source.offloads |= event.tier is not Tier.GPU
    source.unknown_blocks += result.unknown_blocks
    tally.stored_blocks += result.stored_blocks
    tally.orphan_blocks += result.orphan_blocks


def _remove(index: Index, source: Source, event: BlockRemoved, tally: Tally, *, now: int) -> None:
    result = index.remove(
        source.index_id, tier=event.tier, group=event.group, engine_hashes=event.block_hashes, now=now
    )
    source.offloads |= event.tier is not Tier.GPU
    source.unknown_blocks += result.unknown_blocks
    tally.removed_blocks += result.removed_blocks


def _report_drops(index: Index, registry: Registry) -> None:
    for index_id, blocks in index.orphan_drops():
        source = registry.by_index_id(index_id)
        if source is not None:
            source.orphans_dropped += blocks
            registry.lose(source, f"{blocks} blocks waited for a parent and orphan_blocks_max left no room")
