"""What each event of a batch does: to the index, to hints, to claims of owners, and to the counters of its source.

The events have been sifted (app/service/sifting.py), so none of them is refused here, and each of them is applied whole.
They are applied in order: an engine tells removals before what it stores in their place, and a clear in the middle of a
batch concerns what came before it.
"""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Callable, Mapping

from app.config import Settings
from app.events import BlockRemoved, BlocksHashed, BlockStored, Event, PrefixesStored, Tier
from app.index.interface import Index
from app.pods import Source
from app.service.hints import HintBook, Holder, read_hints
from app.service.owners import Owners, read_owners
from app.service.registry import Registry

_KINDS: Mapping[type[Event], str] = {BlocksHashed: BlockStored.__name__}  # counted under another name


@dataclasses.dataclass(slots=True)
class Tally:
    owner: int  # of the batch; 0 is nobody
    stored_blocks: int = 0
    removed_blocks: int = 0
    orphan_blocks: int = 0  # had to wait when they came; some may have been chained since


class Effects:
    """Part of the service. `now` gives the index's ticks."""

    def __init__(
        self,
        settings: Settings,
        index: Index,
        registry: Registry,
        owners: Owners,
        hints: HintBook,
        *,
        now: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._index = index
        self._registry = registry
        self._owners = owners
        self._hints = hints
        self._now = now

    def apply(self, source: Source, events: tuple[Event, ...], lora: str | None, owner: int) -> Tally:
        """`lora` is the adapter of events that name none."""
        spec = self._registry.find(source.pod).spec
        lora = lora or spec.lora
        now = self._now()
        tally = Tally(owner)
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
                self.report_drops()  # what was lost before the clear must not degrade what comes after it
                self._registry.clear_gpu(source)
        self.report_drops()
        self._hints.after_batch(source.index_id, now)
        return tally

    def report_drops(self) -> None:
        """Blocks that waited and found no room are lost for good, of whichever source they were."""
        for index_id, blocks in self._index.orphan_drops():
            source = self._registry.by_index_id(index_id)
            if source is not None:
                source.orphans_dropped += blocks
                cause = f"{blocks} blocks waited for a parent and orphan_blocks_max left no room"
                self._registry.lose(source, cause)

    def learn_chunk_sizes(self, source: Source, chunk_sizes: Mapping[Tier, int]) -> None:
        """What was stored while a smaller size passed for the tier's was an unfinished end."""
        for tier, size in chunk_sizes.items():
            before = source.chunk_sizes.get(tier, size)
            source.chunk_sizes[tier] = size
            if before != size:
                for context in self._index.contexts():
                    if context.block_size == before:
                        self._index.clear(source.index_id, tier=tier, context=context.id)

    def _store(
        self, source: Source, event: BlockStored, tally: Tally, *, model: str, lora: str | None, now: int
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
        self._note_tier(source, event.tier)
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
        self, source: Source, event: BlocksHashed, tally: Tally, *, model: str, now: int
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
        self._note_tier(source, event.tier)
        tally.stored_blocks += result.stored_blocks

    def _store_prefixes(
        self, source: Source, event: PrefixesStored, tally: Tally, *, model: str, now: int
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
        self._note_tier(source, event.tier)
        tally.stored_blocks += result.stored_blocks

    def _claim_prefixes(self, source: Source, event: PrefixesStored, context: int, now: int) -> None:
        """Whom a dump says the blocks are for: stored once more for each owner, which changes nothing else."""
        names = array.array("Q", event.block_hashes)
        prefixes = array.array("Q", event.prefix_hashes)
        copies = None if event.copies is None else array.array("Q", event.copies)
        places_of: dict[int, list[int]] = {}
        for place, name in enumerate(names):
            places_of.setdefault(name, []).append(place)
        for owner, blocks in read_owners(event.owners or b""):
            places = sorted(place for name in blocks for place in places_of.get(name, ()))
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

    def _remove(self, source: Source, event: BlockRemoved, tally: Tally, *, now: int) -> None:
        result = self._index.remove(
            source.index_id, tier=event.tier, group=event.group, engine_hashes=event.block_hashes, now=now
        )
        self._note_tier(source, event.tier)
        source.unknown_blocks += result.unknown_blocks
        tally.removed_blocks += result.removed_blocks

    def _note_tier(self, source: Source, tier: Tier) -> None:
        if tier is not Tier.GPU and not source.offloads:
            self._registry.offload(source)


def _holder(source: Source, event: BlockStored | BlocksHashed | PrefixesStored) -> Holder:
    return Holder(source.index_id, event.tier, event.group)
