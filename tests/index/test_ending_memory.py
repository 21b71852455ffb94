"""Whatever is called, and whichever time that it asks for memory and gets none: it raises MemoryError, nothing has
changed or what its leading blocks change, and made again it does what it would have done.

An index is told a history of steps, and then the call gets no memory. Beside it stand twins that had all they needed: one
that was not called, and one for each number of leading blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app import _native
from app.fuzzy.fuzzy_index import FuzzyIndex, FuzzyLimits
from app.index.prefix_index import IndexExport, IndexImport, IndexLimits, PrefixIndex
from app.ingest.vllm import plain_batch
from tests import ending_memory
from tests.index.exporting import export_frames
from tests.reference import _mix64 as mix64

pytestmark = ending_memory.MARK

BLOCK_SIZE = 2
SALT = b"\x91\xa4salt"
MODELS = ("m", "n")
SPOTS = 3
LIMITS = IndexLimits(ttl_ticks=0)
Path = tuple[int, ...]


def _uint64s(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 8}Q", packed)


def _uint32s(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def uint64s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks `start` to the end of `path`, as the source calls them that draws this seed."""

    path: Path
    start: int = 0
    seed: int = 0
    said: Path = ()  # these are called as blocks of that path are

    def cut(self, blocks: int) -> Blocks:
        return dataclasses.replace(self, path=self.path[: self.start + blocks])

    def name(self, length: int) -> int:
        return mix64(hash((self.seed, *(self.said or self.path)[:length])) % 2**64)

    @property
    def names(self) -> bytes:
        return uint64s(*map(self.name, range(self.start + 1, len(self.path) + 1)))

    @property
    def tokens(self) -> bytes:
        return b"".join(struct.pack("<2I", kind, kind % 7) for kind in self.path[self.start :])

    @property
    def keys(self) -> tuple[bytes, ...] | None:
        kinds = self.path[self.start :]
        return tuple(SALT if kind == 9 else b"" for kind in kinds) if 9 in kinds else None


@dataclasses.dataclass(frozen=True)
class Picture:
    names: list[tuple[int, ...]]  # context, source, tier, group, engine hash, prefix hash, copies
    slots: list[tuple[int, int, int, int, int, int]]
    stats: list[tuple[str, int]]
    orphans: list[int]
    blocks: list[tuple[int, int, int, int]]
    claims: list[tuple[int, int]]
    contents: list[list[int]]


class World:
    def __init__(self, limits: IndexLimits = LIMITS) -> None:
        self.limits = limits
        self.contents = FuzzyIndex(FuzzyLimits())
        self.index = PrefixIndex(limits, self.contents)
        self.now = 0
        self.sources = [self.index.add_source() for _ in range(SPOTS)]
        self.owners = [0, self.index.add_owner(), self.index.add_owner()]
        self.contexts = [self.index.context(model, None, BLOCK_SIZE, 0) for model in MODELS]
        self.export: IndexExport | None = None
        self.frames: list[bytes] = []
        self.batch = plain_batch()

    # -- steps

    def hold(self) -> None:
        self.index.holdings(self.contexts[0], self.prefixes((1, 2, 3)), self.now)

    def apply(self, events: int = 3) -> None:
        new, gone = Blocks((4, 4, 4)), Blocks(A[:2])
        said: list[Any] = [
            ["BlockStored", _uint64s(new.names), None, _uint32s(new.tokens), BLOCK_SIZE, None, "GPU"],
            ["BlockRemoved", _uint64s(gone.names), "GPU"],
            ["BlockStored", _uint64s(new.names), None, _uint32s(new.tokens), BLOCK_SIZE, None, "GPU"],
        ]
        assert self.batch.read_msgpack(msgspec.msgpack.encode([1.0, said[:events], None]), 10)
        self.index.apply_plain(self.batch, self.sources[0], self.contexts[0], now=self.now, count_copies=True)

    def wait(self, ticks: int) -> None:
        self.now += ticks

    def store(
        self,
        blocks: Blocks,
        spot: int = 0,
        context: int = 0,
        tier: int = 0,
        group: int = 0,
        owner: int = 0,
        count_copies: bool = True,
    ) -> None:
        self.index.store(
            self.sources[spot],
            self.contexts[context],
            tier=tier,
            group=group,
            engine_hashes=blocks.names,
            parent=blocks.name(blocks.start) if blocks.start else None,
            token_ids=blocks.tokens,
            extra_keys=blocks.keys,
            now=self.now,
            count_copies=count_copies,
            owner=self.owners[owner],
        )

    def place(self, blocks: Blocks, spot: int = 0, tier: int = 0, group: int = 0, owner: int = 0) -> None:
        self.index.place(
            self.sources[spot],
            tier=tier,
            group=group,
            engine_hashes=blocks.names,
            now=self.now,
            owner=self.owners[owner],
        )

    def prefixes(self, path: Path, start: int = 0) -> bytes:
        whole = Blocks(path)
        return self.index.prefix_hashes("m", None, BLOCK_SIZE, whole.tokens, whole.keys)[8 * start :]

    def store_prefixes(
        self, blocks: Blocks, spot: int = 0, tier: int = 0, owner: int = 0, copies: int = 1
    ) -> None:
        prefixes = self.prefixes(blocks.path, blocks.start)
        self.index.store_prefixes(
            self.sources[spot],
            self.contexts[0],
            tier=tier,
            group=0,
            engine_hashes=blocks.names,
            prefix_hashes=prefixes,
            copies=uint64s(copies) * (len(prefixes) // 8),
            now=self.now,
            owner=self.owners[owner],
        )

    def store_hashed(self, blocks: Blocks, spot: int = 0, tier: int = 0, owner: int = 0) -> None:
        prefixes = self.prefixes(blocks.path)
        chain_from = struct.unpack_from("<Q", prefixes, 8 * blocks.start - 8)[0] if blocks.start else None
        contents = uint64s(*(mix64(kind) for kind in blocks.path[blocks.start :] for _ in range(2)))
        self.index.store_hashed(
            self.sources[spot],
            self.contexts[0],
            tier=tier,
            group=0,
            engine_hashes=blocks.names,
            chain_from=chain_from,
            prefix_hashes=prefixes[8 * blocks.start :],
            contents=contents,
            now=self.now,
            owner=self.owners[owner],
        )

    def remove(self, blocks: Blocks, spot: int = 0, tier: int = 0, group: int = 0) -> None:
        self.index.remove(
            self.sources[spot], tier=tier, group=group, engine_hashes=blocks.names, now=self.now
        )

    def remove_backwards(self, blocks: Blocks, spot: int = 0, tier: int = 0) -> None:
        names = struct.unpack(f"<{len(blocks.names) // 8}Q", blocks.names)
        self.index.remove(
            self.sources[spot], tier=tier, group=0, engine_hashes=uint64s(*names[::-1]), now=self.now
        )

    def clear(self, spot: int = 0, tier: int | None = None, context: int | None = None) -> None:
        only = None if context is None else self.contexts[context]
        self.index.clear(self.sources[spot], tier=tier, context=only)

    def drop_source(self, spot: int) -> None:
        if self.index._core.has_source(self.sources[spot]):
            self.index.drop_source(self.sources[spot])

    def add_source(self) -> None:
        self.sources.append(self.index.add_source())

    def add_owner(self) -> None:
        self.owners.append(self.index.add_owner())

    def clear_owner(self, owner: int) -> None:
        self.index.clear_owner(self.owners[owner])

    def add_context(self, model: str) -> None:
        self.contexts.append(self.index.context(model, None, BLOCK_SIZE, self.now))

    def mark(self, path: Path, spot: int = 0, ttl: int = 1_000) -> None:
        prefixes = self.prefixes(path)
        self.index.add_speculative(self.contexts[0], self.sources[spot], prefixes, ttl, self.now)

    def match(self, path: Path) -> None:
        whole = Blocks(path)
        self.index.match_tokens(self.contexts[0], whole.tokens, whole.keys, self.now)

    def sweep(self, visits_max: int = 4_096) -> None:
        self.index.sweep(self.now, visits_max)

    def list_all(self) -> None:
        self.index.list_all(4_096, self.now)

    def begin_export(self) -> None:
        """As whoever exports does: what fails is closed."""
        self.frames = []
        self.export = None
        export = self.index.start_export()
        try:
            self.frames.append(export.names(2)[0])
            self.export = export
        finally:
            if self.export is None:
                export.close()

    # -- what can be asked

    def settle(self) -> None:
        """What a call puts off that finds no memory, the next one does: orphans expire, and contents are told of."""
        self.index.remove(self.live()[0], tier=0, group=0, engine_hashes=b"", now=self.now)

    def live(self) -> list[int]:
        return [source for source in self.sources if self.index._core.has_source(source)]

    def names(self) -> list[tuple[int, ...]]:
        runs, cursor = self.index.names(0, 1_000_000, self.now)
        assert cursor is None
        found = []
        for run in runs:
            columns = [
                struct.unpack(f"<{len(column) // 8}Q", column)
                for column in (run.engine_hashes, run.prefix_hashes, run.copies)
            ]
            found += [
                (run.context, run.source, run.tier, run.group, *row) for row in zip(*columns, strict=True)
            ]
        return sorted(found)

    def picture(self) -> Picture:
        """Of all that can be asked without a trace."""
        self.settle()
        names = self.names()
        slots = sorted(
            (slot.context, slot.source, slot.tier, slot.group, slot.blocks, slot.digest)
            for slot in self.index.slots()
            if slot.blocks
        )
        if not self.limits.ttl_ticks:
            held: dict[tuple[int, ...], set[int]] = {}
            for *slot, _, prefix, _ in names:
                held.setdefault(tuple(slot), set()).add(prefix)
            told = [(*slot, len(of), sum(map(mix64, of)) % 2**64) for slot, of in sorted(held.items())]
            assert told == slots, "a slot holds what it names"
        stats = dataclasses.asdict(self.index.stats())
        del stats["bytes"]
        return Picture(
            names,
            slots,
            sorted(stats.items()),
            [self.index.orphan_blocks(source) for source in self.live()],
            [self.index.blocks_by_tier(source) for source in self.live()],
            sorted(self.index.owner_claims().items()),
            [
                sorted(self.contents.prefix_hashes(context))
                for context in self.contexts
                if self.contents.has_context(context)
            ],
        )

    def answers(self, paths: Sequence[Path]) -> Any:
        """To questions."""
        found: list[Any] = [self.exported()]
        for path in paths:
            whole = Blocks(path)
            for context in self.contexts[:1]:
                found.append(
                    sorted(map(repr, self.index.match_tokens(context, whole.tokens, whole.keys, self.now)))
                )
                prefixes = self.prefixes(path)
                found.append(sorted(map(repr, self.index.holdings(context, prefixes, self.now))))
                found += [self.contents.grid(context, whole.tokens, 2, lambda prefixes: prefixes)]
        for path in paths[:1]:  # what is counted and not said
            self.remove(Blocks(path))
            found.append(self.picture())
        return found

    def written(self) -> list[bytes]:
        """The frames of an export."""
        export = self.export or self.index.start_export()
        frames = self.frames + export_frames(export, export.contents, 3, lambda: None)
        done = False
        while not done:
            frame, done = export.claims(3)
            frames.append(frame)
        export.close()
        self.export = None
        self.frames = []
        return frames

    def restoring(self, world: World) -> IndexImport:
        """Of what this one wrote, into an index of its own."""
        world.owners += [world.index.add_owner() for _ in self.owners[len(world.owners) :]]
        importing = world.index.start_import(saved_at=self.now, elapsed=0, now=self.now)
        for slot in self.index.slots():
            if slot.context in self.contexts[:2]:
                importing.slot(
                    slot,
                    context=world.contexts[self.contexts.index(slot.context)],
                    source=world.sources[self.sources.index(slot.source)],
                )
        for owner in self.index.owner_claims():
            importing.owner(owner, owner=world.owners[self.owners.index(owner)])
        return importing

    def exported(self) -> Any:
        """The names and claims of an index that reads what this one exports."""
        frames = self.written()
        fresh = World(self.limits)
        importing = self.restoring(fresh)
        assert all(importing.frame(frame) for frame in frames)
        while not importing.settle(3):
            pass
        return fresh.names(), sorted(fresh.index.owner_claims().items()), fresh.index.slots()

    def empty(self) -> None:
        """Nothing is left when its sources are gone and nobody owns anything."""
        for owner in self.owners[1:]:
            self.index.clear_owner(owner)
        for source in self.live():
            self.index.drop_source(source)
        for _ in range(3):
            while not self.index.sweep(self.now, 1_000_000).idle:
                pass
        stats = self.index.stats()
        assert not any(
            (
                stats.prefixes,
                stats.holder_sets,
                stats.engine_keys,
                stats.copies,
                stats.orphan_blocks,
                stats.speculative_blocks,
                stats.claims,
            )
        ), stats
        assert not self.index.slots()
        assert not any(
            len(self.contents.prefix_hashes(context))
            for context in self.contexts
            if self.contents.has_context(context)
        )


Step = Callable[[World], object]


def step(name: str, *args: Any, **more: Any) -> Step:
    return lambda world: getattr(world, name)(*args, **more)


def nothing(world: World) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Call:
    """And the same with fewer leading blocks."""

    whole: Step
    leading: Sequence[Step] = ()
    has_parts: bool = True  # see check_parts

    @classmethod
    def of(cls, name: str, blocks: Blocks, **more: Any) -> Call:
        cuts = [blocks.cut(count) for count in range(1, len(blocks.path) - blocks.start)]
        if name == "remove_backwards":
            cuts = [dataclasses.replace(blocks, start=start) for start in range(1, len(blocks.path))]
        leading = [step(name, cut, **more) for cut in cuts]
        if name == "store":  # where leading blocks are restated, fewer of them count no copies either
            leading += [step(name, cut, **more, count_copies=False) for cut in cuts]
        return cls(step(name, blocks, **more), leading)


def told(history: Sequence[Step], limits: IndexLimits) -> World:
    world = World(limits)
    for each in history:
        each(world)
    return world


def check(
    history: Sequence[Step], call: Call, paths: Sequence[Path] = (), limits: IndexLimits = LIMITS
) -> int:
    """Returns how often the call failed."""
    build = functools.partial(told, history, limits)
    before, after = [], []
    for part in (nothing, *call.leading, call.whole):
        twin = build()
        part(twin)
        before.append(twin.picture())
        call.whole(twin)
        after.append((twin.picture(), twin.answers(paths), twin.index.orphan_drops()))
    failures = 0
    for missing in (1, ending_memory.FOR_EVER):
        for world, failed in ending_memory.attempts(build, call.whole, missing):
            picture = world.picture()
            if not failed:
                assert picture == before[-1], "a call that says nothing is as good as one that had memory"
                continue
            failures += 1
            fits = [at for at, each in enumerate(before) if each == picture]
            call.whole(world)
            again = world.picture()
            if not fits:
                assert call.has_parts, f"neither whole nor nothing:\n{picture}\n{before}"
                check_parts(before[0], picture, before[-1], again)
            elif missing == 1:
                assert (again, world.answers(paths), world.index.orphan_drops()) in [after[at] for at in fits]
            else:
                assert again in [after[at][0] for at in fits]
            world.empty()
    return failures


def check_parts(before: Picture, some: Picture, whole: Picture, again: Picture) -> None:
    """Some of it is done where that is more than a block: what waited for it, its name in several contexts, or what had
    that name before. Made again, the call does the rest."""
    names_before, names, names_of_all, names_again = (
        {name[:-1] for name in each.names} for each in (before, some, whole, again)
    )
    contexts = {name[0] for name in names_before ^ names_of_all}
    moved = names_before | names_of_all
    is_moved = len({name[:-1] for name in moved}) < len(moved)
    assert before.orphans != whole.orphans or len(contexts) > 1 or is_moved, (
        f"neither whole nor nothing:\n{some}\n{before}\n{whole}"
    )
    assert names_before & names_of_all <= names <= names_before | names_of_all
    assert names_again == names_of_all
    assert again.orphans == whole.orphans


A: Path = (1, 2, 3, 4, 5)
B: Path = (1, 2, 7, 8)
SALTED: Path = (1, 9, 3)
HISTORY = [
    step("store", Blocks(A), owner=1),
    step("store", Blocks(B), tier=1),
    step("store", Blocks(A[:4]), spot=1),
    step("store", Blocks(A[:3], seed=1), spot=2, owner=2),
    step("store", Blocks((3, 3, 3)), context=1, spot=1),
    step("store", Blocks((6, 6)), group=1),
    step("store", Blocks((6, 6), seed=1), group=1),
    step("store", Blocks((5, 5, 5)), spot=2),
    step("clear", spot=2, tier=1),
    step("mark", (1, 2, 3, 4, 5, 6), spot=1),
]
WAITING = [
    step("store", Blocks((8, 8, 8, 8, 8), start=3), owner=1),
    step("store", Blocks((8, 8, 7), start=2)),
    step("store", Blocks((8, 8, 8, 8), start=2)),
]
CALLS = {
    "new": Call.of("store", Blocks((2, 2, 2, 2)), owner=1),
    "new, on top": Call.of("store", Blocks((*A, 7, 8), start=5), owner=2),
    "new, of a salt": Call.of("store", Blocks(SALTED)),
    "new, of a source that is new there": Call.of("store", Blocks((2, 2, 2)), context=1, spot=2),
    "known": Call.of("store", Blocks(A, seed=0), spot=2, owner=1),
    "known, in another tier": Call.of("store", Blocks(A), tier=2),
    "known, once more": Call.of("store", Blocks(A, start=1), owner=2),
    "told again": Call.of("store", Blocks((*A, 6))),
    "renamed": Call.of("store", Blocks(A, seed=2), spot=1, tier=1, owner=1),
    "renamed as by another": Call.of("store", Blocks(A, seed=1), spot=1, tier=1),
    "under another name": Call.of("store", Blocks(A, seed=3)),
    "under the name of another": Call.of("store", Blocks((2, 2, 2, 2), said=A)),
    "without its parent": Call.of("store", Blocks((4, 4, 4), start=1), owner=1),
    "that others wait for": Call.of("store", Blocks((8, 8)), owner=2),
    "place": Call.of("place", Blocks(A), tier=3, owner=1),
    "store_prefixes": Call.of("store_prefixes", Blocks((*A, 6)), spot=2, owner=1, copies=3),
    "store_hashed": Call.of("store_hashed", Blocks((*A, 6, 7), start=4), owner=1),
    "remove": Call.of("remove", Blocks(A)),
    "remove backwards": Call.of("remove_backwards", Blocks((5, 5, 5)), spot=2),
    "remove the last": Call.of("remove", Blocks((5, 5, 5)), spot=2),
    "remove what is renamed": Call.of("remove", Blocks(A[:3], seed=1), spot=2),
    "remove one of two names": Call.of("remove", Blocks((6, 6)), group=1),
    "remove what waits": Call.of("remove", Blocks((8, 8, 8, 8, 8), start=2)),
    "apply": Call(step("apply"), [step("apply", events) for events in (1, 2)]),
    "clear": Call(step("clear"), has_parts=False),
    "clear in two contexts": Call(step("clear", spot=1), has_parts=False),
    "clear a tier": Call(step("clear", tier=1), has_parts=False),
    "clear a context": Call(step("clear", spot=1, context=1), has_parts=False),
    "drop_source": Call(step("drop_source", 1), has_parts=False),
    "add_source": Call(step("add_source")),
    "add_owner": Call(step("add_owner")),
    "clear_owner": Call(step("clear_owner", 1)),
    "add_context": Call(step("add_context", "o")),
    "mark": Call(step("mark", (1, 2, 9, 9)), [step("mark", (1, 2, 9, 9)[:cut]) for cut in (1, 2, 3)]),
    "match": Call(step("match", A)),
    "holdings": Call(step("hold")),
    "list_all": Call(step("list_all")),
    "sweep": Call(step("sweep")),
    "begin_export": Call(step("begin_export")),
}
UNNEEDED = {"clear_owner", "list_all"}  # without memory it does all the same


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("state", ["new", "few", "waiting", "exporting"])
def test_a_call_without_memory(name: str, state: str) -> None:
    more = {
        "new": [],
        "few": [step("store", Blocks(A))],  # what is rare has no table yet
        "waiting": [*HISTORY, *WAITING],
        "exporting": [*HISTORY, step("begin_export"), step("list_all"), step("remove", Blocks(A), spot=1)],
    }[state]
    failures = check(more, CALLS[name], [A, B, SALTED])
    assert failures > 0 or name in UNNEEDED or state in ("new", "few")


kinds = st.sampled_from([1, 1, 2, 9])
paths = st.lists(kinds, min_size=1, max_size=5).map(tuple)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    name = draw(
        st.sampled_from(
            ["store"] * 8
            + ["place", "store_prefixes", "store_hashed", "remove", "remove", "remove", "remove_backwards"]
            + ["clear", "mark", "match", "sweep", "list_all", "wait", "add_context", "add_owner"]
        )
    )
    spot, tier = draw(st.sampled_from([0, 0, 1])), draw(st.sampled_from([0, 0, 0, 1]))
    if name in ("store", "place", "store_prefixes", "store_hashed", "remove", "remove_backwards"):
        blocks = Blocks(draw(paths), seed=draw(st.sampled_from([0, 0, 1])))
        if name != "place" and name != "remove_backwards" and draw(st.booleans()):
            blocks = dataclasses.replace(blocks, start=draw(st.integers(0, len(blocks.path) - 1)))
        more: dict[str, Any] = {"spot": spot, "tier": tier}
        if name.startswith("store") or name == "place":
            more["owner"] = draw(st.integers(0, 2))
        if name == "store":
            more["context"] = draw(st.sampled_from([0, 0, 0, 1]))
        if name == "store_prefixes":
            more["copies"] = draw(st.integers(1, 2))
        return Call.of(name, blocks, **more)
    if name == "mark":
        path = draw(paths)
        return Call(step("mark", path, spot), [step("mark", path[:cut], spot) for cut in range(1, len(path))])
    if name == "match":
        return Call(step("match", draw(paths)))
    args: dict[str, dict[str, Any]] = {
        "clear": {"spot": spot, "tier": draw(st.none() | st.integers(0, 1))},
        "sweep": {"visits_max": draw(st.sampled_from([1, 4, 4_096]))},
        "wait": {"ticks": draw(st.sampled_from([1, 9, 10]))},
        "add_context": {"model": "o"},
    }
    return Call(step(name, **args.get(name, {})))


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    history=st.lists(calls(), max_size=12),
    call=calls(),
    exporting=st.sampled_from([None, None, 0, 4]),
    ttl_ticks=st.sampled_from([0, 0, 10]),
    orphan_blocks_max=st.sampled_from([3, 1_000]),
    asked=st.lists(paths, max_size=3),
)
def test_any_call_without_memory(
    history: list[Call],
    call: Call,
    exporting: int | None,
    ttl_ticks: int,
    orphan_blocks_max: int,
    asked: list[Path],
) -> None:
    steps = [each.whole for each in history]
    if exporting is not None:
        steps.insert(exporting, step("begin_export"))
    limits = IndexLimits(ttl_ticks=ttl_ticks, orphan_blocks_max=orphan_blocks_max)
    check(steps, call, asked, limits)


@pytest.mark.parametrize("missing", [1, ending_memory.FOR_EVER])
def test_a_restore_without_memory_leaves_nothing_that_cannot_be_taken_away(missing: int) -> None:
    saved = told([*HISTORY, *WAITING], LIMITS)
    frames = saved.written()
    failures = 0
    for last in range(len(frames)):

        def restored(last: int = last) -> tuple[World, IndexImport]:
            world = World()
            importing = saved.restoring(world)
            assert all(importing.frame(frame) for frame in frames[:last])
            return world, importing

        def call(state: tuple[World, IndexImport], last: int = last) -> None:
            state[1].frame(frames[last])

        for (world, importing), failed in ending_memory.attempts(restored, call, missing):
            failures += failed
            ending_memory.insist(functools.partial(importing.settle, 2), missing)
            while not importing.settle(2):
                pass
            world.picture()
            world.empty()
    assert failures > 0


@pytest.mark.parametrize("missing", [1, ending_memory.FOR_EVER])
@pytest.mark.parametrize("prefixes_max", [6, 1_000])
def test_a_full_context_without_memory_stays_within_its_bound(prefixes_max: int, missing: int) -> None:
    limits = IndexLimits(ttl_ticks=0, prefixes_per_context_max=6, prefixes_max=prefixes_max)
    history = [step("store", Blocks(A), owner=1), step("store", Blocks((7, 7)), spot=1), step("begin_export")]
    whole = step("store", Blocks((*A[:2], 8, 8, 8)), owner=2)
    failures = 0
    for world, failed in ending_memory.attempts(functools.partial(told, history, limits), whole, missing):
        failures += failed
        for _ in range(2):
            assert len({name[-2] for name in world.picture().names}) <= 6
            whole(world)
        assert world.index.stats().prefixes <= 6
        world.empty()
    assert failures > 0


@pytest.mark.parametrize("missing", [1, ending_memory.FOR_EVER])
def test_what_is_listed_without_memory_is_found_by_its_hash(missing: int) -> None:
    blocks, chance = 3_000, random.Random(1)
    index = PrefixIndex(LIMITS)
    context, source = index.context("m", None, BLOCK_SIZE, 0), index.add_source()
    tokens = chance.randbytes(4 * BLOCK_SIZE * blocks)
    index.store(
        source,
        context,
        tier=0,
        group=0,
        engine_hashes=chance.randbytes(8 * blocks),
        parent=None,
        token_ids=tokens,
        extra_keys=None,
        now=0,
    )
    while not ending_memory.insist(lambda: index.list_all(256, 0), missing):
        pass
    prefixes = index.prefix_hashes("m", None, BLOCK_SIZE, tokens, None)
    assert len(index.holdings(context, prefixes, 0)) == blocks


def test_a_table_that_was_not_reserved_takes_all_the_same() -> None:
    keys = random.Random(1).randbytes(8 * 1_000)

    def reserve(table: _native.IdTable) -> None:
        table.reserve(1_000_000)

    for table, failed in ending_memory.attempts(_native.IdTable, reserve, 1):
        assert failed
        table.insert(keys)
        assert set(_uint32s(table.numbers(keys))) == set(range(1_000))
