"""Frames out of an index that changes while they are written, and into another: the index of the last instant."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.index.prefix_index import IndexLimits, PrefixIndex
from tests.index.test_names import BLOCK_SIZE, CONTEXTS, SOURCES, Holder, steps, uint64s

NameSet = set[tuple[int, int, int, int, int, int, int]]


def all_names(index: PrefixIndex, sources: list[int], contexts: list[int], now: int) -> NameSet:
    """(source, context, tier, group, engine hash, prefix, copies), sources and contexts by their place."""
    found = []
    cursor: int | None = 0
    while cursor is not None:
        runs, cursor = index.names(cursor, 1_000, now)
        for run in runs:
            columns = zip(
                struct.iter_unpack("<Q", run.engine_hashes),
                struct.iter_unpack("<Q", run.prefix_hashes),
                struct.iter_unpack("<Q", run.copies),
                strict=True,
            )
            place = (sources.index(run.source), contexts.index(run.context), run.tier, run.group)
            found += [(*place, name, prefix, copies) for (name,), (prefix,), (copies,) in columns]
    assert len(set(found)) == len(found)
    return set(found)


def export(index: PrefixIndex, names_max: int, meanwhile: Callable[[], None]) -> list[bytes]:
    """All frames; `meanwhile` is called between any two, but not before the last."""
    writing = index.start_export()
    frames, done, left = [], False, 0
    while not done:
        frame, done = writing.names(names_max)
        frames.append(frame)
        meanwhile()
    for _ in range(3):
        frame, left = writing.changes(names_max)
        frames.append(frame)
        meanwhile()
    left = 1
    while left:
        frame, left = writing.changes(names_max)
        frames.append(frame)
    return frames


def restored(
    index: PrefixIndex,
    frames: list[bytes],
    limits: IndexLimits,
    saved_at: int = 0,
    elapsed: int = 0,
    now: int = 0,
) -> tuple[PrefixIndex, list[int], list[int]]:
    """A new index with the sources and contexts of the test_names.Holder that was exported."""
    fresh = PrefixIndex(limits)
    fresh.add_source()  # so that numbers differ
    sources = [fresh.add_source() for _ in range(SOURCES)]
    contexts = [fresh.context(model, lora, BLOCK_SIZE, 0) for model, lora in reversed(CONTEXTS)][::-1]
    importing = fresh.start_import(saved_at=saved_at, elapsed=elapsed, now=now)
    for slot in index.slots():
        importing.slot(slot, context=contexts[slot.context - 1], source=sources[slot.source - 1])
    for frame in frames:
        assert importing.frame(frame)
    return fresh, sources, contexts


@given(
    before=steps,
    meanwhile=st.lists(st.one_of(steps, st.just("sweep")), max_size=8),
    after=steps,
    names_max=st.sampled_from([1, 2, 5, 1_000]),
)
@settings(deadline=None, max_examples=300)
def test_the_index_of_the_last_instant(
    before: list[Any], meanwhile: list[Any], after: list[Any], names_max: int
) -> None:
    limits = IndexLimits(ttl_ticks=0)
    index = PrefixIndex(limits)
    first = Holder(index)
    for step in before:
        first.apply(step)
    waiting: Iterator[Any] = iter(meanwhile)

    def change() -> None:
        batch: Any = next(waiting, [])
        if batch == "sweep":
            while not index.sweep(0, 10).idle:
                pass
        else:
            for step in batch:
                first.apply(step)

    frames = export(index, names_max, change)
    fresh, sources, contexts = restored(index, frames, limits)
    index.start_export().close()

    second = Holder.__new__(Holder)
    second.index, second.sources, second.contexts = fresh, sources, contexts
    assert all_names(fresh, sources, contexts, 0) == all_names(index, first.sources, first.contexts, 0)
    assert second.picture() == first.picture()
    for step in after:
        assert second.apply(step) == first.apply(step)
    assert second.picture() == first.picture()
    assert sorted((s.tier, s.group, s.blocks, s.digest) for s in fresh.slots() if s.blocks) == sorted(
        (s.tier, s.group, s.blocks, s.digest) for s in index.slots() if s.blocks
    )


@pytest.mark.parametrize("seed", range(6))
def test_while_entries_expire_and_are_evicted(seed: int) -> None:
    """Each slot has one name for a prefix: what two names and an expiry do is a limit that the core states."""
    r = random.Random(seed)
    limits = IndexLimits(ttl_ticks=25, prefixes_per_context_max=300)
    index = PrefixIndex(limits)
    first = Holder(index)
    now = 0

    def change() -> None:
        nonlocal now
        now += r.choice([0, 0, 1, 3])
        for _ in range(40):
            source, context = r.randrange(SOURCES), r.randrange(len(CONTEXTS))
            names = [r.randrange(1, 1_500) for _ in range(3)]
            place: dict[str, Any] = {"tier": r.choice([0, 0, 2]), "group": 0, "now": now}
            kind = r.choice(
                ["store"] * 6 + ["remove", "remove", "match", "sweep"] + ["clear"] * (r.random() < 0.05)
            )
            if kind == "store":
                index.store_prefixes(
                    first.sources[source],
                    first.contexts[context],
                    engine_hashes=uint64s(*names),
                    prefix_hashes=uint64s(*(name * 0x9E3779B97F4A7C15 % 2**64 for name in names)),
                    copies=uint64s(*(r.choice([1, 1, 2]) for _ in names)),
                    **place,
                )
            elif kind == "remove":
                index.remove(first.sources[source], engine_hashes=uint64s(*names), **place)
            elif kind == "clear":
                index.clear(first.sources[source])
            elif kind == "match":
                prefix = names[0] * 0x9E3779B97F4A7C15 % 2**64
                index.match_hashes(first.contexts[context], uint64s(prefix), now)
            else:
                index.sweep(now, 300)

    for _ in range(60):
        change()
    frames = export(index, 50, change)
    assert len(frames) > 10
    assert index.stats().evicted
    assert index.stats().expired

    # Nothing matched is forgotten early where the ttl has time for the whole writing: without it, all is there.
    endless = IndexLimits(ttl_ticks=0)
    fresh, sources, contexts = restored(index, frames, endless, saved_at=now, now=now)
    expected = all_names(index, first.sources, first.contexts, now)
    got = all_names(fresh, sources, contexts, now)
    assert expected <= got
    # With it, nothing is there that is not in the index, and what lacks was matched while it was written.
    fresh, sources, contexts = restored(index, frames, limits, saved_at=now, now=now)
    got = all_names(fresh, sources, contexts, now)
    assert got <= expected
    assert len(expected - got) < len(expected) // 4
    # Time goes on while nobody runs.
    fresh, sources, contexts = restored(
        index, frames, limits, saved_at=now, elapsed=limits.ttl_ticks, now=now
    )
    assert all_names(fresh, sources, contexts, now) == set()


def test_ages_are_kept() -> None:
    limits = IndexLimits(ttl_ticks=100)
    index = PrefixIndex(limits)
    first = Holder(index)
    for name, now in ((1, 0), (2, 30), (3, 60)):
        index.store_prefixes(
            first.sources[0],
            first.contexts[0],
            tier=0,
            group=0,
            engine_hashes=uint64s(name),
            prefix_hashes=uint64s(name),
            copies=None,
            now=now,
        )
    frames = export(index, 10, lambda: None)
    fresh, sources, contexts = restored(index, frames, limits, saved_at=60, elapsed=20, now=1_000)
    left = [
        sorted(row[4] for row in all_names(fresh, sources, contexts, now))
        for now in (1_019, 1_020, 1_049, 1_050, 1_079, 1_080)
    ]
    assert left == [[1, 2, 3], [2, 3], [2, 3], [3], [3], []]


@given(cut=st.integers(0, 400), byte=st.integers(0, 255), data=st.binary(max_size=64))
@settings(deadline=None)
def test_no_bytes_do_harm(cut: int, byte: int, data: bytes) -> None:
    """A checksum stands before this, so only memory safety is asked for: no crash, whatever comes."""
    limits = IndexLimits(ttl_ticks=0)
    index = PrefixIndex(limits)
    first = Holder(index)
    index.store_prefixes(
        first.sources[0],
        first.contexts[0],
        tier=0,
        group=0,
        engine_hashes=uint64s(*range(1, 9)),
        prefix_hashes=uint64s(*range(11, 19)),
        copies=uint64s(*[2] * 8),
        now=0,
    )
    (frame, *_) = export(index, 100, lambda: None)
    for bad in (frame[:cut], frame[:cut] + bytes([byte]) + frame[cut + 1 :], frame + data, data):
        fresh, sources, contexts = restored(index, [], limits)
        importing = fresh.start_import(saved_at=0, elapsed=0, now=0)
        for slot in index.slots():
            importing.slot(slot, context=contexts[slot.context - 1], source=sources[slot.source - 1])
        taken = importing.frame(bad)
        assert taken or bad != frame
        all_names(fresh, sources, contexts, 0)


@pytest.mark.parametrize("said", [0, 1, 100, 30_000, 10**6])
def test_a_guess_of_the_size_changes_nothing_but_time(said: int) -> None:
    limits = IndexLimits(ttl_ticks=0)
    index = PrefixIndex(limits)
    first = Holder(index)
    draw = random.Random(said)
    for name in range(1, 30_001, 1_000):
        prefixes = draw.randbytes(8_000)
        for source in (0, 1):  # two engines with names of their own
            names = range(name + source * 100_000, name + source * 100_000 + 1_000)
            index.store_prefixes(
                first.sources[source],
                first.contexts[0],
                tier=0,
                group=0,
                engine_hashes=uint64s(*names),
                prefix_hashes=prefixes,
                copies=None,
                now=0,
            )
    frames = export(index, 5_000, lambda: None)
    fresh, sources, contexts = restored(index, [], limits)
    importing = fresh.start_import(saved_at=0, elapsed=0, now=0)
    for slot in index.slots():
        importing.slot(slot, context=contexts[slot.context - 1], source=sources[slot.source - 1])
    importing.expect(other_names=said, entries=dict.fromkeys(contexts, said))
    for frame in frames:
        assert importing.frame(frame)
    before = all_names(index, first.sources, first.contexts, 0)
    assert all_names(fresh, sources, contexts, 0) == before
    assert fresh.stats().engine_keys == 60_000
    while not fresh.sweep(0, 10_000).idle:
        pass
    # What a wrong guess made room for grows, shrinks and goes as any table.
    for name in range(1, 30_001, 500):
        for source in (0, 1):
            names = range(name + source * 100_000, name + source * 100_000 + 499)
            fresh.remove(sources[source], tier=0, group=0, engine_hashes=uint64s(*names), now=0)
    assert fresh.stats().engine_keys == 120
    assert fresh.stats().bytes < 8_000_000


def test_what_is_told_again_is_held_once_though_the_first_was_too_old() -> None:
    """A block is written, then stored by another source, and written again; when the snapshot is read, what was
    written first has expired, and what was written last has not."""
    limits = IndexLimits(ttl_ticks=10)
    index = PrefixIndex(limits)
    context = index.context("m", None, 1, 0)
    sources = [index.add_source(), index.add_source()]

    def store(source: int, now: int) -> None:
        place: dict[str, Any] = {"tier": 0, "group": 0, "extra_keys": None, "parent": None}
        index.store(
            source, context, engine_hashes=uint64s(7), token_ids=struct.pack("<I", 1), now=now, **place
        )

    store(sources[0], 0)
    writing = index.start_export()
    frames = [writing.names(100)[0]]
    store(sources[1], 6)
    frames.append(writing.changes(100)[0])
    fresh = PrefixIndex(limits)
    second = fresh.context("m", None, 1, 0)
    importing = fresh.start_import(saved_at=6, elapsed=5, now=100)
    renamed = {source: fresh.add_source() for source in sources}
    for slot in index.slots():
        importing.slot(slot, context=second, source=renamed[slot.source])
    assert all(importing.frame(frame) for frame in frames)
    for left, source in ((1, renamed[sources[0]]), (0, renamed[sources[1]])):
        result = fresh.remove(source, tier=0, group=0, engine_hashes=uint64s(7), now=100)
        assert result.removed_blocks == 1
        assert len(fresh.match_tokens(second, struct.pack("<I", 1), None, 100)) == left
