"""What engines say of a block beside its tokens (`metadata` of an event), kept until a match comes by that block.

A connector says which agent a prefix belongs to, at which step of a workflow, and where it may be found again. The
indexer does not interpret any of that: a hint is a small object that comes back unchanged as `hints` of a match row.

A hint belongs to one holder's name for a block: (source, tier, group, engine hash), the last block of its event.
It lives exactly as long as the index holds that block there, and no event has to be told here for that:

    asked     a hint counts only while `prefix_of` still says the prefix that it was put under
    stored    what the index does not hold at that moment is dropped before the store, so that a block that comes
              back without metadata comes back without its old hint; a further copy keeps it
    swept     the timer's slices drop the others, which only gives memory back

So removal, clear, restart, TTL and eviction need no code of their own. A block that waits for its parent has no
prefix yet: its hint waits too, and is looked for again after the next batches of its source.

Refused, and counted: metadata that is no object, or longer than `hint_bytes_max`. Past `hints_max` the oldest hint
goes. `hints_max` 0 keeps none: then nothing here is called, and metadata is never read.
Cost: some 10 us and 700 bytes a hint. A query of 256 blocks takes 15 us more if a pod that holds a part of the prompt
has any hints at all; if one of them is for this prompt, the answer is made on the long way.

In a snapshot hints have frames of their own: each hint once, in order, and between two frames whatever was put or
dropped since the one before. So after the last frame they are the hints of the snapshot's instant. Hints that wait for
their block are left out, like their blocks.
"""

from __future__ import annotations

import array
import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from app.config import Settings
from app.events import Tier
from app.index.interface import Index

WAITING_VISITS_MAX = 256  # hints looked for again after one batch
SWEEP_VISITS_MAX = 64  # of one slice
FRAME_MARK = b"\xfd\xff\xff\xff"  # no frame of the index begins so

_REFUSED = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)
_from_json = msgspec.json.Decoder(dict[str, Any]).decode
_from_msgpack = msgspec.msgpack.Decoder(dict[str, Any]).decode


class Hint(msgspec.Struct, frozen=True):
    """`tokens` is where the block ends in the prompt; `metadata` is JSON."""

    block: int
    tier: Tier
    tokens: int
    metadata: bytes


class Holder(NamedTuple):
    source: int
    tier: Tier
    group: int


class _Name(NamedTuple):
    holder: Holder
    engine_hash: int


class _Kept(NamedTuple):
    context: int
    prefix: int | None  # None: the block waits for its parent
    metadata: bytes


# Of a frame: source, tier, group, engine hash, context, prefix, metadata; without a prefix the hint is gone.
_Row = tuple[int, int, int, int, int, int | None, bytes]
_read_rows = msgspec.msgpack.Decoder(list[_Row]).decode


class HintBook:
    """Counted since the start: `stored`, `refused` (not an object, or too long), `evicted` (`hints_max`), and `cut`
    (left out of rows, `row_hints_max`)."""

    def __init__(self, settings: Settings, index: Index) -> None:
        self.stored = 0
        self.refused = 0
        self.evicted = 0
        self.cut = 0
        self.is_on = settings.hints_max > 0
        self._hints_max = settings.hints_max
        self._bytes_max = settings.hint_bytes_max
        self._per_row_max = settings.row_hints_max
        self._index = index
        self._kept: collections.OrderedDict[_Name, _Kept] = collections.OrderedDict()  # oldest first
        self._by_prefix: dict[int, list[_Name]] = {}
        self._waiting: dict[int, dict[_Name, None]] = {}  # by source
        self._of_source: collections.Counter[int] = collections.Counter()
        self._sweep: list[_Name] = []
        self._bytes = 0
        self._unwritten: list[_Name] = []  # of an export under way, the next one last
        self._changed: dict[_Name, None] | None = None  # since it was written; None: no export is under way

    @property
    def is_empty(self) -> bool:
        return not self._kept

    def gauges(self) -> Mapping[str, int]:
        waiting = sum(len(names) for names in self._waiting.values())
        return {"kept": len(self._kept), "waiting": waiting, "bytes": self._bytes}

    def counters(self) -> Mapping[str, int]:
        return {"stored": self.stored, "refused": self.refused, "evicted": self.evicted, "cut": self.cut}

    # -- events

    def before_store(self, holder: Holder, engine_hashes: bytes, now: int) -> None:
        """What is to be stored and is not held now had another life."""
        if not self._of_source[holder.source]:
            return
        for engine_hash in array.array("Q", engine_hashes):
            name = _Name(holder, engine_hash)
            kept = self._kept.get(name)
            if kept is not None and not self._is_held(name, kept, now):
                self._drop(name)

    def put(self, holder: Holder, context: int, engine_hash: int, metadata: bytes, now: int) -> None:
        """After the store of that block. The newest hint of a block takes the place of the one before."""
        text = _read(metadata, self._bytes_max)
        if text is None:
            self.refused += 1
            return
        name = _Name(holder, engine_hash)
        self._drop(name)
        self._make_room()
        self._keep(name, _Kept(context, self._prefix_of(name, context, now), text))
        self.stored += 1

    def after_batch(self, source: int, now: int) -> None:
        """Blocks that waited may have been chained."""
        waiting = self._waiting.get(source)
        if not waiting:
            return
        for name in list(waiting)[:WAITING_VISITS_MAX]:
            kept = self._kept[name]
            prefix = self._prefix_of(name, kept.context, now)
            if prefix is not None:
                self._drop(name)
                self._keep(name, kept._replace(prefix=prefix))
            elif len(waiting) > WAITING_VISITS_MAX:  # behind those that were not looked for yet
                waiting[name] = waiting.pop(name)

    # -- queries

    def knows_any(self, sources: Iterable[int]) -> bool:
        """One of them has a hint, of whatever prompt."""
        return not self._of_source.keys().isdisjoint(sources)

    def find(
        self, prefix_hashes: bytes, block_size: int, reaches: Mapping[int, int], now: int
    ) -> dict[int, list[Hint]]:
        """Source -> hints of the prompt's blocks that it holds without a hole, by `reaches` (source -> tokens)."""
        found: dict[int, list[Hint]] = {}
        prefixes = array.array("Q", prefix_hashes)
        if self._by_prefix.keys().isdisjoint(prefixes):
            return found
        for number, prefix in enumerate(prefixes, 1):
            for name in self._by_prefix.get(prefix, ()):
                tokens = number * block_size
                if tokens > reaches.get(name.holder.source, 0):
                    continue
                kept = self._kept[name]
                if self._is_held(name, kept, now):
                    hint = Hint(name.engine_hash, name.holder.tier, tokens, kept.metadata)
                    found.setdefault(name.holder.source, []).append(hint)
        return found

    def best(self, hints: Iterable[Hint]) -> tuple[Hint, ...]:
        """`row_hints_max` of them: the longest prefixes first, fast tiers before slow ones."""
        ranked = sorted(hints, key=lambda hint: (-hint.tokens, hint.tier, hint.block))
        self.cut += max(0, len(ranked) - self._per_row_max)
        return tuple(ranked[: self._per_row_max])

    def of_blocks(self, holder: Holder, engine_hashes: Iterable[int], now: int) -> dict[int, bytes]:
        """Engine hash -> metadata as JSON, of those that have one."""
        if not self._of_source[holder.source]:
            return {}
        names = [_Name(holder, engine_hash) for engine_hash in engine_hashes]
        known = [(name, self._kept[name]) for name in names if name in self._kept]
        return {name.engine_hash: kept.metadata for name, kept in known if self._is_held(name, kept, now)}

    # -- time

    def sweep(self, now: int) -> None:
        """A slice of SWEEP_VISITS_MAX hints; the next call goes on behind it."""
        if not self._sweep:
            self._sweep = list(self._kept)
        for _ in range(min(SWEEP_VISITS_MAX, len(self._sweep))):
            name = self._sweep.pop()
            kept = self._kept.get(name)
            if kept is None or self._is_held(name, kept, now):
                continue
            if kept.prefix is None and self._waits(name.holder.source):
                continue
            self._drop(name)

    # -- across processes

    def start_export(self) -> None:
        """One at a time; `end_export` in any case."""
        self._unwritten = list(reversed(self._kept))
        self._changed = {}

    def export(self, hints_max: int) -> tuple[bytes, bool]:
        """A frame of up to so many; True when all until now are written."""
        assert self._changed is not None, "an export begins with start_export"
        names = [self._unwritten.pop() for _ in range(min(hints_max, len(self._unwritten)))]
        while not self._unwritten and self._changed and len(names) < hints_max:
            name = next(iter(self._changed))
            del self._changed[name]
            names.append(name)
        rows: list[_Row] = []
        for name in names:
            (source, tier, group), engine_hash = name
            kept = self._kept.get(name) or _Kept(0, None, b"")
            metadata = b"" if kept.prefix is None else kept.metadata
            rows.append((source, int(tier), group, engine_hash, kept.context, kept.prefix, metadata))
        return FRAME_MARK + msgspec.msgpack.encode(rows), not self._unwritten and not self._changed

    def end_export(self) -> None:
        self._unwritten, self._changed = [], None

    def restore(self, frame: bytes, sources: Mapping[int, int], contexts: Mapping[int, int]) -> bool:
        """Takes a frame in, with the numbers of sources and contexts there and here, behind their blocks. False: it
        is none, and nothing of it was taken."""
        try:
            rows: Sequence[_Row] = _read_rows(memoryview(frame)[len(FRAME_MARK) :])
            names = [_Name(Holder(sources.get(row[0], -1), Tier(row[1]), row[2]), row[3]) for row in rows]
        except _REFUSED:
            return False
        for name, (*_, context, prefix, metadata) in zip(names, rows, strict=True):
            self._drop(name)
            if prefix is None or name.holder.source < 0 or context not in contexts or not self.is_on:
                continue
            if len(metadata) > self._bytes_max:
                self.refused += 1
                continue
            self._make_room()
            self._keep(name, _Kept(contexts[context], prefix, metadata))
        return True

    # -- how

    def _prefix_of(self, name: _Name, context: int, now: int) -> int | None:
        source, tier, group = name.holder
        return self._index.prefix_of(
            context, source, tier=tier, group=group, engine_hash=name.engine_hash, now=now
        )

    def _is_held(self, name: _Name, kept: _Kept, now: int) -> bool:
        return kept.prefix is not None and self._prefix_of(name, kept.context, now) == kept.prefix

    def _waits(self, source: int) -> bool:
        return self._index.orphan_blocks(source) > 0

    def _make_room(self) -> None:
        if len(self._kept) >= self._hints_max:
            self._drop(next(iter(self._kept)))
            self.evicted += 1

    def _note(self, name: _Name) -> None:
        """Invariant: whatever changes a hint calls this, so that an export under way writes it again."""
        if self._changed is not None:
            self._changed.pop(name, None)  # in the order of the changes, which is that of the hints
            self._changed[name] = None

    def _keep(self, name: _Name, kept: _Kept) -> None:
        self._note(name)
        self._kept[name] = kept
        self._of_source[name.holder.source] += 1
        self._bytes += len(kept.metadata)
        if kept.prefix is None:
            self._waiting.setdefault(name.holder.source, {})[name] = None
        else:
            self._by_prefix.setdefault(kept.prefix, []).append(name)

    def _drop(self, name: _Name) -> None:
        kept = self._kept.pop(name, None)
        if kept is None:
            return
        self._note(name)
        source = name.holder.source
        self._bytes -= len(kept.metadata)
        self._of_source[source] -= 1
        if not self._of_source[source]:
            del self._of_source[source]
        if kept.prefix is None:
            del self._waiting[source][name]
            if not self._waiting[source]:
                del self._waiting[source]
        else:
            self._by_prefix[kept.prefix].remove(name)
            if not self._by_prefix[kept.prefix]:
                del self._by_prefix[kept.prefix]


class _Said(msgspec.Struct):
    block: int
    metadata: msgspec.Raw


def read_hints(raw: bytes) -> list[tuple[int, bytes]]:
    """(engine hash, metadata) of what a dump says in `hints`, in either notation; [] for what is no such list."""
    decode = msgspec.json.decode if raw[:1] == b"[" else msgspec.msgpack.decode
    try:
        said = decode(raw, type=list[_Said])
    except _REFUSED:
        return []
    return [(hint.block, bytes(hint.metadata)) for hint in said if 0 <= hint.block < 2**64]


def _read(raw: bytes, bytes_max: int) -> bytes | None:
    """The object as JSON, from either notation: no map of msgpack begins with a brace or a space."""
    if len(raw) > bytes_max:
        return None
    try:
        fields = _from_json(raw) if raw[:1] in b"{ \t\r\n" else _from_msgpack(raw)
        msgspec.msgpack.encode(fields)  # an answer can be asked for in both
        text = msgspec.json.encode(fields)
    except _REFUSED:
        return None
    return text if len(text) <= bytes_max else None
