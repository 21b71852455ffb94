"""Finds the events of a batch that can be applied, before anything is changed: so a batch without any usable event is
refused as a whole.

Checked here is what the codec cannot know, the block size. On the GPU tier every block of a source has one size: the
declared one, or that of its first event. An offload tier has a size of its own: LMCache stores chunks of 256 tokens
beside engine blocks of 16. It publishes the rest of a prompt as a smaller chunk, whose length is given as its block
size. No longer prompt can ever find that chunk, so a tier's size is the largest that its source has shown, and smaller
chunks are ignored. Otherwise each length would become a context of its own, which every query would have to ask.

O(events); nearly every batch passes as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

import msgspec

from app.events import BlocksHashed, BlockStored, Event, EventBatch, PrefixesStored, RejectedEvent, Tier


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
