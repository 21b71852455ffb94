"""Contents for fuzzy matches in the frames of an index: what was found before is found after, whatever changes while
the frames are written."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Set

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.fuzzy.fuzzy_index import FuzzyIndex, FuzzyLimits
from app.index.prefix_index import IndexLimits, PrefixIndex
from tests.index.exporting import export_frames

BLOCK_SIZE = 8
MODELS = ("m", "n")
SOURCES = 2
SALT = b"\x91\xa4salt"
CONTENTS = 12  # so that many prefixes have one content
Answers = list[tuple[int, int, int, int, bool]]


def words(random_: random.Random, size: int = BLOCK_SIZE) -> tuple[int, ...]:
    return tuple(random_.randrange(1 << 32) for _ in range(size))


def uint64s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def packed(*blocks: tuple[int, ...]) -> bytes:
    return b"".join(struct.pack(f"<{len(block)}I", *block) for block in blocks)


def alike(content: tuple[int, ...], other: int) -> tuple[int, ...]:
    """One token is another one: SimHashes that lie near in many cases."""
    return (*content[:-1], other)


class Bench:
    """An index with its fuzzy index under random changes."""

    def __init__(self, seed: int, limits: IndexLimits | None = None, *, shingle: int = 1) -> None:
        self.random = random.Random(seed)
        self.limits = limits or IndexLimits(ttl_ticks=0)
        self.fuzzy = FuzzyIndex(FuzzyLimits(shingle=shingle, matches_per_window_max=4_096))
        self.index = PrefixIndex(self.limits, self.fuzzy)
        base = [words(self.random) for _ in range(CONTENTS // 2)]
        self.contents = base + [alike(content, 7) for content in base]
        self.sources = [self.index.add_source() for _ in range(SOURCES)]
        self.contexts = [self.index.context(model, None, BLOCK_SIZE, 0) for model in MODELS]
        self.names: list[int] = []
        self.last_name = 0
        self.now = 0

    def store(self, blocks: list[tuple[int, ...]], *, salted: bool = False) -> None:
        r = self.random
        names = [self.last_name + 1 + i for i in range(len(blocks))]
        self.last_name = names[-1]
        parent = r.choice(self.names) if self.names and r.random() < 0.6 else None
        self.index.store(
            r.choice(self.sources),
            r.choice(self.contexts),
            tier=0,
            group=0,
            engine_hashes=uint64s(*names),
            parent=parent,
            token_ids=packed(*blocks),
            extra_keys=(SALT,) + (b"",) * (len(blocks) - 1) if salted else None,
            now=self.now,
        )
        self.names += names

    def change(self, steps: int = 6) -> None:
        r = self.random
        for _ in range(steps):
            kind = r.random()
            if kind < 0.6 or not self.names:
                blocks = [r.choice(self.contents) for _ in range(r.randint(1, 4))]
                self.store(blocks, salted=r.random() < 0.1)
            elif kind < 0.93:
                for _ in range(r.randint(1, 6)):
                    if self.names:
                        name = self.names.pop(r.randrange(len(self.names)))
                        for source in self.sources:
                            self.index.remove(
                                source, tier=0, group=0, engine_hashes=uint64s(name), now=self.now
                            )
            elif kind < 0.96:
                self.index.clear(r.choice(self.sources))
            else:
                self.index.sweep(self.now, r.choice([3, 50]))

    def sweep_all(self) -> None:
        for _ in range(2):  # the pass under way may have gone past what died since
            while not self.index.sweep(self.now, 1_000).idle:
                pass

    def prompt(self) -> bytes:
        return packed(*self.contents)

    def answers(self) -> Answers:
        return answers(self.fuzzy, self.contexts, self.prompt())


def answers(fuzzy: FuzzyIndex, contexts: list[int], prompt: bytes) -> Answers:
    """Every match of every aligned window: (place of the context, offset, prefix, distance, exact)."""

    def usable(prefixes: Set[int]) -> Set[int]:
        return prefixes

    return sorted(
        (place, window.token_offset, match.prefix_hash, match.distance, match.exact)
        for place, context in enumerate(contexts)
        for window in fuzzy.grid(context, prompt, 8, usable)
        for match in window.matches
    )


def export(index: PrefixIndex, slice_: int, meanwhile: Callable[[], None]) -> list[bytes]:
    writing = index.start_export()
    frames = export_frames(writing, writing.contents, slice_, meanwhile)
    assert writing.has_whole_contents()
    return frames


def restored(
    bench: Bench, frames: list[bytes], slice_: int, *, contents: bool = True, sources: int = SOURCES
) -> tuple[PrefixIndex, FuzzyIndex, list[int], list[int]]:
    fuzzy = FuzzyIndex(FuzzyLimits(shingle=bench.fuzzy.shingle, matches_per_window_max=4_096))
    fresh = PrefixIndex(bench.limits, fuzzy)
    fresh.add_source()  # so that numbers differ
    fresh.context("other", None, BLOCK_SIZE, 0)
    new_sources = [fresh.add_source() for _ in range(SOURCES)]
    contexts = [fresh.context(model, None, BLOCK_SIZE, 0) for model in MODELS]
    importing = fresh.start_import(saved_at=bench.now, elapsed=0, now=bench.now, takes_contents=contents)
    for slot in bench.index.slots():
        if (place := bench.sources.index(slot.source)) < sources:
            importing.slot(
                slot, context=contexts[bench.contexts.index(slot.context)], source=new_sources[place]
            )
    for frame in frames:
        assert importing.frame(frame)
    while not importing.settle(slice_):
        pass
    return fresh, fuzzy, new_sources, contexts


@given(
    seed=st.integers(0, 2**32),
    before=st.integers(0, 25),
    slice_=st.sampled_from([1, 2, 7, 1_000]),
    changing=st.booleans(),
)
@settings(deadline=None, max_examples=150)
def test_answers_before_are_answers_after(seed: int, before: int, slice_: int, changing: bool) -> None:
    bench = Bench(seed)
    bench.change(before)
    frames = export(bench.index, slice_, (lambda: bench.change(1)) if changing else lambda: None)
    fresh, fuzzy, sources, contexts = restored(bench, frames, slice_)
    bench.index.start_export().close()
    bench.sweep_all()  # what nobody holds is not in a snapshot
    assert answers(fuzzy, contexts, bench.prompt()) == bench.answers()

    # The entries carry what their children may be, and what goes with them.
    twin = Bench(seed)
    twin.random.setstate(bench.random.getstate())
    twin.fuzzy, twin.index, twin.sources, twin.contexts = fuzzy, fresh, sources, contexts
    twin.names, twin.last_name = list(bench.names), bench.last_name
    for _ in range(8):
        bench.change(3)
        twin.change(3)
    bench.sweep_all()
    twin.sweep_all()
    assert twin.answers() == bench.answers()


@pytest.mark.parametrize("seed", range(4))
def test_while_entries_expire_and_are_evicted(seed: int) -> None:
    bench = Bench(seed, IndexLimits(ttl_ticks=30, prefixes_per_context_max=60))
    bench.change(40)

    def change() -> None:
        bench.now += bench.random.choice([0, 0, 0, 1, 5])
        bench.change(2)

    frames = export(bench.index, 3, change)
    _, fuzzy, _, contexts = restored(bench, frames, 5)
    bench.sweep_all()
    assert bench.answers()
    restored_answers = answers(fuzzy, contexts, bench.prompt())
    assert set(bench.answers()) <= set(restored_answers)  # what has expired goes with a sweep, here and there


@pytest.mark.parametrize("awake", [False, True])
def test_a_long_chain_comes_whole(awake: bool) -> None:
    bench = Bench(1)
    for number in range(2_000):
        bench.names = []
        bench.store([(number,) * BLOCK_SIZE, bench.contents[0]])
    if awake:
        assert bench.answers()
    frames = export(bench.index, 100, lambda: None)
    _, fuzzy, _, contexts = restored(bench, frames, 100)
    assert len(bench.answers()) >= 2_000
    assert answers(fuzzy, contexts, bench.prompt()) == bench.answers()
    assert fuzzy.stats().same_content == bench.fuzzy.stats().same_content > 1_900


def test_contents_that_only_exact_matches_find() -> None:
    """4,000 contents with one SimHash (the same tokens in another order): more than near matches look through."""
    bench = Bench(1)
    r = random.Random(5)
    tokens = list(words(r))
    stored = []
    for _ in range(4_000):
        r.shuffle(tokens)
        bench.names = []
        bench.store([tuple(tokens)])
        stored.append(tuple(tokens))
    stored = stored[:50] + stored[-50:]
    for content in stored:  # and chains of those
        bench.store([content])
    assert bench.answers() is not None
    assert bench.fuzzy.stats().crowded > 0
    frames = export(bench.index, 64, lambda: None)
    _, fuzzy, _, contexts = restored(bench, frames, 64)
    assert answers(fuzzy, contexts, bench.prompt()) == bench.answers()
    assert fuzzy.stats().crowded >= bench.fuzzy.stats().crowded
    assert sorted(fuzzy.prefix_hashes(contexts[0])) == sorted(bench.fuzzy.prefix_hashes(bench.contexts[0]))
    for content in stored:
        found = [
            [answer for answer in answers(of, places, packed(content)) if answer[-1]]
            for of, places in ((fuzzy, contexts), (bench.fuzzy, bench.contexts))
        ]
        assert found[0] == found[1] != []


def test_many_blocks_are_spread_as_before() -> None:
    """A table that grows while it is filled from the snapshot: none of its buckets takes more than its share."""
    bench = Bench(3)
    for _ in range(150):
        bench.names = []
        bench.store([words(bench.random) for _ in range(100)])
    frames = export(bench.index, 512, lambda: None)
    _, fuzzy, _, _ = restored(bench, frames, 512)
    before, after = bench.fuzzy.stats(), fuzzy.stats()
    assert (after.blocks, after.crowded, after.unswept) == (before.blocks, 0, 0) == (15_000, 0, 0)
    assert after.bytes < 1.5 * before.bytes


def test_a_source_that_does_not_come_back_takes_its_contents_along() -> None:
    bench = Bench(9)
    bench.change(60)
    frames = export(bench.index, 50, lambda: None)
    fresh, fuzzy, sources, contexts = restored(bench, frames, 50, sources=1)
    bench.index.drop_source(bench.sources[1])
    bench.sweep_all()
    assert answers(fuzzy, contexts, bench.prompt()) == bench.answers() != []
    fresh.drop_source(sources[0])
    while not fresh.sweep(0, 1_000).idle:
        pass
    assert answers(fuzzy, contexts, bench.prompt()) == []


def test_contents_that_are_not_wanted_or_not_there() -> None:
    bench = Bench(4)
    bench.change(30)
    frames = export(bench.index, 50, lambda: None)
    fresh, fuzzy, _, contexts = restored(bench, frames, 50, contents=False)
    assert answers(fuzzy, contexts, bench.prompt()) == []
    assert sorted((s.blocks, s.digest) for s in fresh.slots() if s.blocks) == sorted(
        (s.blocks, s.digest) for s in bench.index.slots() if s.blocks
    )
    plain = PrefixIndex(bench.limits)
    writing = plain.start_export()
    frame, done = writing.contents(10)
    assert done
    assert not writing.has_whole_contents()
    importing = bench.index.start_import(saved_at=0, elapsed=0, now=0)
    assert importing.frame(frame)
    writing.close()


def test_bytes_that_are_no_contents() -> None:
    index = PrefixIndex(IndexLimits(), FuzzyIndex(FuzzyLimits()))
    importing = index.start_import(saved_at=0, elapsed=0, now=0)
    whole = struct.pack("<II", 0xFFFFFFFF, 1) + bytes(32)
    assert importing.frame(whole)
    for length in range(len(whole)):
        assert not importing.frame(whole[:length])
    assert not importing.frame(whole + b"\0")
    assert not importing.frame(struct.pack("<II", 0xFFFFFFFF, 2**32 - 1) + bytes(32))
