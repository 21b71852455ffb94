"""The paged KV cache of one rank: sequences that share the pages of their common prefix.

What it does is what vLLM's scheduler does with its block pool, and it says so in the same events, in the
same order: evictions first, one `Removed` each, then one `Stored` for the run of blocks that became full;
decoded blocks one by one; the same block stored again when a second physical copy appears; `Cleared`
queued by a reset and only read with the next drain.

The prefix is looked up by the digest of the whole prefix before a page is taken, so what is shared costs
nothing. A lookup stops at `(tokens - 1) // block_size` blocks: the last token must be computed to predict
the next one, which is why an exact repeat of an aligned prompt computes its last block again. Pages with a
name or with several references never change: a sequence that must write into one gets a copy first. Draft
tokens occupy pages but are never named, so nobody else can find them, until they are accepted.

An operation that does not fit raises LimitExceeded and changes nothing. Cost: one digest a block.
"""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Sequence

from app.errors import InvalidInput, LimitExceeded
from app.ingest.vllm import Cleared, EngineHash, Removed, Stored, WireEvent
from app.simulator.block_names import BlockNamer, extra_keys, packed
from app.simulator.pages import Name, PagePool


@dataclasses.dataclass(frozen=True, slots=True)
class KVCacheSettings:
    """`hash_seed` differs between pods of older releases: equal blocks then have different names.

    `nameless_first`: pages that hold no full block are reused before others (seen in vLLM 0.32 and 0.33, not up
    to 0.23).
    """

    capacity_pages: int = 4_000
    block_size: int = 16
    hash_seed: bytes = b""
    nameless_first: bool = True
    hash_as_bytes: bool = False  # 32 raw bytes in events instead of an unsigned integer


@dataclasses.dataclass(frozen=True, slots=True)
class Attached:
    """`cached_tokens` were found; with `computed_tokens` more they are in the cache now."""

    cached_tokens: int
    computed_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class KVCacheStats:
    sequences: int
    pages_total: int
    pages_allocated: int
    pages_free: int
    prefix_shares: int  # pages found instead of computed, since start
    prefix_map_size: int
    shared_pages: int
    page_references: int
    queried_tokens: int  # of every prompt, since start
    hit_tokens: int


@dataclasses.dataclass(slots=True)
class _Sequence:
    """`names` are those of its full, accepted blocks; the last `drafts` tokens are not accepted yet."""

    token_ids: array.array[int]
    pages: list[int]
    names: list[Name]
    salt: str | None
    lora: str | None
    drafts: int = 0


class PagedKVCache:
    """Sequences are named by the caller. Not thread-safe."""

    def __init__(self, settings: KVCacheSettings | None = None) -> None:
        self.settings = settings or KVCacheSettings()
        self._pool = PagePool(self.settings.capacity_pages, nameless_first=self.settings.nameless_first)
        self._namer = BlockNamer(self.settings.block_size, self.settings.hash_seed)
        self._sequences: dict[str, _Sequence] = {}
        self._events: list[WireEvent] = []
        self._prefix_shares = 0
        self._queried_tokens = 0
        self._hit_tokens = 0

    # -- sequences

    def lookup(self, token_ids: Sequence[int], *, salt: str | None = None, lora: str | None = None) -> int:
        """Leading tokens that an attach would find now."""
        return len(self._find_prefix(packed(token_ids), salt, lora)) * self.settings.block_size

    def attach(
        self,
        sequence: str,
        token_ids: Sequence[int],
        *,
        salt: str | None = None,
        lora: str | None = None,
        compute_max: int | None = None,
        restate: bool = False,
    ) -> Attached:
        """Take the prompt's cached prefix and pages for up to `compute_max` tokens behind it.

        A sequence of that name is replaced. With `restate` the blocks that were found are reported
        again, in front, as vLLM does for a request with `kv_cache_report_mode=full`.
        """
        if not len(token_ids):
            raise InvalidInput("a sequence needs at least one token", field="token_ids")
        tokens = packed(token_ids)
        found = self._find_prefix(tokens, salt, lora)
        cached = len(found) * self.settings.block_size
        end = len(tokens) if compute_max is None else min(len(tokens), cached + compute_max)
        self._check_room_to_attach(sequence, [page for _, page in found], end)
        for _, page in found:
            self._pool.share(page)
        self.detach(sequence)
        self._prefix_shares += len(found)
        self._queried_tokens += len(tokens)
        self._hit_tokens += cached
        made = _Sequence(
            tokens[:cached], [page for _, page in found], [name for name, _ in found], salt, lora
        )
        self._sequences[sequence] = made
        if restate:
            self._report_stored(made, 0)
        self._extend(made, tokens[cached:end])
        self._name_full_blocks(made)
        return Attached(cached, end - cached)

    def append(self, sequence: str, token_ids: Sequence[int]) -> None:
        """Tokens that were computed: the next part of the prompt, or what was decoded."""
        found = self._settled(sequence)
        self._check_room_to_append(found, len(token_ids))
        self._extend(found, packed(token_ids))
        self._name_full_blocks(found)

    def draft(self, sequence: str, token_ids: Sequence[int]) -> None:
        """Speculative tokens behind the sequence; more may follow before they are accepted or rolled back."""
        found = self._sequence(sequence)
        self._check_room_to_append(found, len(token_ids))
        self._extend(found, packed(token_ids))
        found.drafts += len(token_ids)

    def accept_drafts(self, sequence: str, count: int) -> None:
        """The first `count` drafts become tokens of the sequence; the others are rolled back."""
        found = self._sequence(sequence)
        if not 0 <= count <= found.drafts:
            raise InvalidInput(f"{count} drafts cannot be accepted: there are {found.drafts}", field="count")
        self._truncate(found, len(found.token_ids) - found.drafts + count)
        found.drafts = 0
        self._name_full_blocks(found)

    def write(self, sequence: str, position: int, token_id: int) -> None:
        """Replace one token; what stands behind it is computed again, since it depends on it."""
        found = self._settled(sequence)
        if not 0 <= position < len(found.token_ids):
            raise InvalidInput(f"position {position} is not in the sequence", field="position")
        kept = self._page_count(position)
        returned = sum(self._pool.references(page) == 1 for page in found.pages[kept:])
        needed = len(found.pages) - kept
        if position % self.settings.block_size and not self._pool.is_writable(found.pages[kept - 1]):
            needed += 1
        if needed > self._pool.free + returned:
            raise self._no_room(needed)
        behind = found.token_ids[position + 1 :]
        self._truncate(found, position)
        self._extend(found, array.array("I", [token_id]) + behind)
        self._name_full_blocks(found)

    def fork(self, sequence: str, child: str) -> None:
        """A second sequence on the same pages; whoever writes into a shared one copies it first."""
        found = self._settled(sequence)
        if child == sequence:
            return
        for page in found.pages:
            self._pool.share(page)
        self.detach(child)
        self._sequences[child] = dataclasses.replace(
            found, token_ids=found.token_ids[:], pages=list(found.pages), names=list(found.names)
        )

    def detach(self, sequence: str) -> bool:
        """Return the pages, tail first; False when there is no such sequence."""
        found = self._sequences.pop(sequence, None)
        if found is None:
            return False
        for page in reversed(found.pages):
            self._pool.release(page)
        return True

    def get(self, sequence: str) -> tuple[int, ...]:
        """What the pages of the sequence hold: a copy."""
        found = self._sequence(sequence)
        held = [token for page in found.pages for token in self._pool.content(page)]
        return tuple(held[: len(found.token_ids)])

    def pages(self, sequence: str) -> tuple[int, ...]:
        return tuple(self._sequence(sequence).pages)

    # -- the whole cache

    def reset(self) -> bool:
        """Forget every name. Refused while a sequence is attached, as engines refuse it."""
        if self._sequences:
            return False
        self._pool.forget_names()
        self._events.append(Cleared())
        return True

    def drain_events(self) -> list[WireEvent]:
        drained, self._events = self._events, []
        return drained

    def stats(self) -> KVCacheStats:
        used = list(self._pool.used_pages())
        return KVCacheStats(
            sequences=len(self._sequences),
            pages_total=self.settings.capacity_pages,
            pages_allocated=len(used),
            pages_free=self._pool.free,
            prefix_shares=self._prefix_shares,
            prefix_map_size=self._pool.names,
            shared_pages=sum(self._pool.references(page) > 1 for page in used),
            page_references=sum(self._pool.references(page) for page in used),
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
        )

    def usage(self) -> float:
        """Part of the pages that sequences hold, 0 to 1."""
        return 1 - self._pool.free / self.settings.capacity_pages

    # -- inside

    def _sequence(self, sequence: str) -> _Sequence:
        try:
            return self._sequences[sequence]
        except KeyError:
            raise InvalidInput(f"no sequence {sequence!r} is attached", field="sequence") from None

    def _settled(self, sequence: str) -> _Sequence:
        found = self._sequence(sequence)
        if found.drafts:
            raise InvalidInput(
                f"sequence {sequence!r} has drafts to accept or roll back first", field="sequence"
            )
        return found

    def _find_prefix(
        self, tokens: array.array[int], salt: str | None, lora: str | None
    ) -> list[tuple[Name, int]]:
        findable = (len(tokens) - 1) // self.settings.block_size
        found: list[tuple[Name, int]] = []
        for name in self._namer.names(tokens, findable, salt, lora):
            page = self._pool.find(name)
            if page is None:
                break
            found.append((name, page))
        return found

    def _check_room_to_attach(self, sequence: str, found: list[int], end: int) -> None:
        replaced = self._sequences.get(sequence)
        old = set(replaced.pages) if replaced is not None else set()
        only_here = {page for page in old if self._pool.references(page) == 1}
        idle_found = sum(self._pool.references(page) == 0 or page in only_here for page in found)
        needed = self._page_count(end) - len(found)
        if needed > self._pool.free + len(only_here) - idle_found:
            raise self._no_room(needed)

    def _check_room_to_append(self, found: _Sequence, count: int) -> None:
        needed = self._page_count(len(found.token_ids) + count) - len(found.pages)
        if count and self._last_page_is_foreign(found):
            needed += 1
        if needed > self._pool.free:
            raise self._no_room(needed)

    def _no_room(self, needed: int) -> LimitExceeded:
        return LimitExceeded(
            f"{needed} pages are needed and {self._pool.free} of {self.settings.capacity_pages} are free "
            "(capacity_pages)",
            bound="capacity_pages",
        )

    def _page_count(self, tokens: int) -> int:
        return -(-tokens // self.settings.block_size)

    def _last_page_is_foreign(self, found: _Sequence) -> bool:
        """The page that the next token falls into belongs to others as well."""
        is_partial = len(found.token_ids) % self.settings.block_size != 0
        return is_partial and not self._pool.is_writable(found.pages[-1])

    def _extend(self, found: _Sequence, tokens: array.array[int]) -> None:
        """Write behind the end. Room has been checked; evictions are reported as they happen."""
        if not tokens:
            return
        size = self.settings.block_size
        held = len(found.token_ids) % size
        if self._last_page_is_foreign(found):
            shared = found.pages[-1]
            copy = self._take()
            self._pool.extend(copy, self._pool.content(shared)[:held])
            found.pages[-1] = copy
            self._pool.release(shared)
        start = 0
        if held:
            start = min(size - held, len(tokens))
            self._pool.shrink(found.pages[-1], held)
            self._pool.extend(found.pages[-1], tokens[:start])
        for begin in range(start, len(tokens), size):
            page = self._take()
            self._pool.extend(page, tokens[begin : begin + size])
            found.pages.append(page)
        found.token_ids.extend(tokens)

    def _take(self) -> int:
        taken = self._pool.take()
        if taken.evicted is not None:
            self._events.append(Removed(block_hashes=[self._engine_hash(taken.evicted)], group_idx=0))
        return taken.page

    def _truncate(self, found: _Sequence, length: int) -> None:
        size = self.settings.block_size
        kept = self._page_count(length)
        for page in reversed(found.pages[kept:]):
            self._pool.release(page)
        del found.pages[kept:]
        del found.token_ids[length:]
        del found.names[length // size :]

    def _name_full_blocks(self, found: _Sequence) -> None:
        """Name every full block of accepted tokens that has none yet, and report the run as stored."""
        size = self.settings.block_size
        first = len(found.names)
        accepted = len(found.token_ids) - found.drafts
        for block in range(first, accepted // size):
            parent = found.names[-1] if found.names else None
            tokens = found.token_ids[block * size : (block + 1) * size]
            name = self._namer.name(parent, tokens, found.salt, found.lora)
            self._pool.give_name(found.pages[block], name)
            found.names.append(name)
        self._report_stored(found, first)

    def _report_stored(self, found: _Sequence, first: int) -> None:
        size = self.settings.block_size
        blocks = range(first, len(found.names))
        if not blocks:
            return
        self._events.append(
            Stored(
                block_hashes=[self._engine_hash(found.names[block]) for block in blocks],
                parent_block_hash=self._engine_hash(found.names[first - 1]) if first else None,
                token_ids=found.token_ids[first * size : len(found.names) * size].tolist(),
                block_size=size,
                lora_id=1 if found.lora is not None else None,
                lora_name=found.lora,
                extra_keys=[extra_keys(found.salt, found.lora, is_root=block == 0) for block in blocks],
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
        )

    def _engine_hash(self, name: Name) -> EngineHash:
        return name if self.settings.hash_as_bytes else int.from_bytes(name[-8:], "big")
