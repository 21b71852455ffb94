"""Snapshots of a service in this process: changes while one is written, what cannot be written, time that passes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from app.config import Settings
from app.errors import SnapshotRefused
from app.events import AllBlocksCleared, Envelope, Tier
from app.fuzzy.fuzzy_index import FuzzyIndex, FuzzyLimits
from app.index.prefix_index import PrefixIndex
from app.pods import PodSpec, SourceState
from app.service import BatchResult, IndexerService, MatchQuery, index_limits
from app.service.saved_state import SavedState
from app.snapshots.file import FileStore, SnapshotReader
from app.snapshots.keeper import SnapshotKeeper
from tests.service.test_service import Clock, batch, stored, tokens, uint64s


class Bench:
    """A service with its keeper; `restarted` is the next process, some seconds later."""

    def __init__(self, path: Path, at_s: float = 1_000_000.0, contents: FuzzyIndex | None = None) -> None:
        self.path = path
        self.clock = Clock()
        self.at_s = at_s
        settings = Settings(ttl_s=100.0, fuzzy=contents is not None)
        self.index = PrefixIndex(index_limits(settings), contents)
        self.service = IndexerService(settings, self.index, clock=self.clock, contents=contents)
        self.keeper = SnapshotKeeper(
            self.service,
            self.index,
            FileStore(path),
            configured=frozenset(),
            interval_s=3_600,
            wall=lambda: self.at_s,
        )

    def restarted(self, later_s: float, contents: FuzzyIndex | None = None) -> Bench:
        fresh = Bench(self.path, self.at_s + later_s, contents)
        asyncio.run(fresh.keeper.restore())
        return fresh

    def post(self, first: int, count: int, *, seq: int | None, pod: str = "pod-a") -> None:
        self.service.post(Envelope(pod=pod, model="m", seq=seq, digest=7), batch(stored(first, count)))

    def depths(self, count: int) -> dict[str, int]:
        result = self.service.match(MatchQuery(model="m", token_ids=tokens(count * 4)))
        return {row.pod: row.matched_blocks for row in result.matches}


def test_changes_while_it_is_written(tmp_path: Path) -> None:
    """100,000 names beside a task that stores and removes: what is on disk is the index when it was finished."""
    bench = Bench(tmp_path / "snapshot")
    source = bench.service.register(PodSpec("pod-a", "m")).sources[0].index_id
    context = bench.index.context("m", None, 4, 0)
    changes = 0

    def store(first: int, last: int) -> None:
        bench.index.store_prefixes(
            source,
            context,
            tier=0,
            group=0,
            engine_hashes=uint64s(*range(first, last)),
            prefix_hashes=uint64s(*(name * 0x9E3779B97F4A7C15 % 2**64 for name in range(first, last))),
            copies=None,
            now=0,
        )

    async def change() -> None:
        nonlocal changes
        while True:
            await asyncio.sleep(0)
            changes += 1
            store(200_000 + changes * 10, 200_000 + changes * 10 + 10)
            gone = uint64s(*range(1 + changes * 5, 1 + changes * 5 + 5))
            bench.index.remove(source, tier=0, group=0, engine_hashes=gone, now=0)

    async def save() -> None:
        changing = asyncio.create_task(change())
        assert await bench.keeper.save()
        changing.cancel()

    store(1, 100_001)
    asyncio.run(save())
    assert changes > 10
    fresh = bench.restarted(0)
    saved = SnapshotReader(bench.path).state
    assert fresh.service.stats()["digest"] == saved.digest
    assert fresh.index.stats().engine_keys == sum(row[5] for row in saved.slots)


def test_ages_and_the_time_between(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "snapshot")
    bench.post(0, 2, seq=0)
    bench.clock.seconds += 60
    bench.post(2, 1, seq=1)
    asyncio.run(bench.keeper.save())
    assert bench.restarted(39).depths(3) == {"pod-a": 3}
    assert bench.restarted(41).depths(3) == {}  # the first blocks are older than the ttl
    later = bench.restarted(39)
    later.clock.seconds += 2
    assert later.depths(3) == {}
    back = bench.restarted(-5_000)  # a wall clock that was set back counts as no time
    assert back.depths(3) == {"pod-a": 3}


def test_silence_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "snapshot")
    bench.post(0, 1, seq=0)
    asyncio.run(bench.keeper.save())
    fresh = bench.restarted(30)
    source = fresh.service.pod("pod-a").sources[0]
    assert source.last_event_at_s == fresh.clock.seconds - 30
    fresh.clock.seconds += Settings().http_silence_deadline_s - 29
    fresh.service.tick()
    assert source.state is SourceState.DOWN


def test_who_is_silent_longest_comes_first_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "snapshot")
    bench.post(0, 1, seq=0, pod="pod-a")
    bench.post(0, 1, seq=0, pod="pod-b")
    bench.clock.seconds += 30
    bench.post(1, 1, seq=1, pod="pod-a")
    asyncio.run(bench.keeper.save())
    fresh = bench.restarted(0)
    fresh.clock.seconds += Settings().http_silence_deadline_s - 30
    fresh.service.tick()
    states = {name: pod.sources[0].state for name, pod in fresh.service.pods.items()}
    assert states == {"pod-a": SourceState.LIVE, "pod-b": SourceState.DOWN}


def test_both_ways_of_an_answer_know_how_long_ago_it_was(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "snapshot")
    bench.post(0, 2, seq=0)
    asyncio.run(bench.keeper.save())
    fresh = bench.restarted(30)
    query = MatchQuery(model="m", token_ids=tokens(8))
    (row,) = fresh.service.match(query).matches
    answer = fresh.service.match_json(query)
    assert answer is not None
    (told,) = json.loads(answer.body)["matches"]
    assert told["last_event_age_s"] == row.last_event_age_s == 30.0
    assert told["reusable_tokens"] == row.reusable_tokens == 4


def test_what_was_learned_of_a_source_comes_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "snapshot")

    def first(to: Bench) -> BatchResult:
        events = batch(stored(0), stored(0, size=8, name=500, tier=Tier.CPU))
        return to.service.post(Envelope(pod="pod-a", model="m", seq=0, digest=7), events)

    first(bench)
    asyncio.run(bench.keeper.save())
    fresh = bench.restarted(1)
    assert first(fresh).duplicate, "it is known by what it was: no restarted engine"
    smaller = batch(stored(0, size=4, name=900, tier=Tier.CPU))
    result = fresh.service.post(Envelope(pod="pod-a", model="m", seq=1), smaller)
    assert (result.stored_blocks, result.ignored) == (0, 1), "the end of a prompt"
    fresh.service.post(Envelope(pod="pod-a", model="m", seq=5), batch())
    fresh.service.post(Envelope(pod="pod-a", model="m", seq=6), batch(AllBlocksCleared()))
    state = fresh.service.pod("pod-a").sources[0].state
    assert state is SourceState.DEGRADED, "a clear says nothing of the blocks on the CPU"


@pytest.mark.parametrize("knows", [True, False], ids=["as it is", "of an older release"])
def test_stamps_of_a_run_come_back(tmp_path: Path, knows: bool) -> None:
    """Or nobody can tell by them."""
    bench = Bench(tmp_path / "snapshot")
    for seq in range(3):
        event = batch(stored(seq), ts=100.0 + seq)
        bench.service.post(Envelope(pod="pod-a", model="m", seq=seq), event)
    if not knows:
        bench.service.pod("pod-a").sources[0].newest_ts = None
    asyncio.run(bench.keeper.save())
    fresh = bench.restarted(1)
    for ts, state in (
        (101.0, SourceState.LIVE),
        (103.0, SourceState.DEGRADED if knows else SourceState.LIVE),
    ):
        again = fresh.service.post(Envelope(pod="pod-a", model="m", seq=1), batch(stored(1), ts=ts))
        assert again.duplicate
        assert fresh.service.pod("pod-a").sources[0].state is state


def test_orphans_are_a_loss(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "snapshot")
    bench.post(0, 1, seq=0)
    bench.post(5, 1, seq=1)
    asyncio.run(bench.keeper.save())
    source = bench.restarted(1).service.pod("pod-a").sources[0]
    assert (source.state, source.last_seq) == (SourceState.DEGRADED, 1)
    assert "waited for their parent" in source.cause


def test_what_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    bench = Bench(folder / "snapshot")
    bench.post(0, 1, seq=0)
    folder.rmdir()
    assert asyncio.run(bench.keeper.save()) is False
    assert bench.keeper.counters()["failed"] == 1
    folder.mkdir()
    assert asyncio.run(bench.keeper.save()) is True
    assert bench.restarted(0).depths(1) == {"pod-a": 1}


@pytest.mark.parametrize("works", [True, False])
def test_what_changes_is_noted_for_a_snapshot_only_while_one_is_written(tmp_path: Path, works: bool) -> None:
    """Else it would be noted for ever."""
    folder = tmp_path / "folder"
    folder.mkdir()
    bench = Bench(folder / "snapshot")
    bench.post(0, 1, seq=0)
    if not works:
        bench.keeper = SnapshotKeeper(
            bench.service,
            bench.index,
            FileStore(bench.path),
            configured=frozenset(),
            interval_s=3_600,
            place=lambda _state: _refuse(),
        )
    with contextlib.nullcontext() if works else pytest.raises(SnapshotRefused):
        asyncio.run(bench.keeper.save())
    with pytest.raises(AssertionError, match="begins with start_export"):
        bench.service.hints.export(1)
    assert [path.name for path in folder.iterdir()] == (["snapshot"] if works else [])


def _refuse() -> SavedState:
    raise SnapshotRefused("made by the test")


def test_the_last_snapshot_has_its_time(tmp_path: Path) -> None:
    """With none at all the one before stays, and nothing else lies about."""
    bench = Bench(tmp_path / "snapshot")
    bench.post(0, 1, seq=0)

    async def end(grace_s: float) -> None:
        bench.keeper.start()
        await bench.keeper.stop(grace_s)

    asyncio.run(end(60))
    bench.post(1, 1, seq=1)
    asyncio.run(end(0))
    assert bench.keeper.counters() == {"saved": 1, "failed": 1, "refused": 0}
    assert [file.name for file in tmp_path.iterdir()] == ["snapshot"]
    assert bench.restarted(0).depths(2) == {"pod-a": 1}


def test_nothing_there_is_nothing_restored(tmp_path: Path) -> None:
    assert Bench(tmp_path / "snapshot").restarted(0).service.pods == {}


def test_copies_come_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "snapshot")
    bench.post(0, 1, seq=0)
    bench.post(0, 1, seq=1)
    asyncio.run(bench.keeper.save())
    fresh = bench.restarted(0)
    source = fresh.service.pod("pod-a").sources[0].index_id
    for left in (1, 0):
        fresh.index.remove(source, tier=0, group=0, engine_hashes=uint64s(100), now=1_000)
        assert fresh.service.blocks_by_tier("pod-a", 0)["gpu"] == left


def found(bench: Bench, contents: FuzzyIndex, count: int) -> list[tuple[int, int]]:
    (context,) = bench.index.find_contexts("m", None)
    windows = contents.grid(context.id, tokens(count * 4), 0, lambda prefixes: prefixes)
    return [(window.token_offset, match.prefix_hash) for window in windows for match in window.matches]


def test_contents_for_fuzzy_matches_come_back(tmp_path: Path) -> None:
    """With the index; into a program without fuzzy matches; out of one; and where SimHashes are made differently."""
    contents = FuzzyIndex(FuzzyLimits())
    bench = Bench(tmp_path / "snapshot", contents=contents)
    bench.post(0, 3, seq=0)
    asyncio.run(bench.keeper.save())
    before = found(bench, contents, 3)
    assert len(before) == 3

    again = FuzzyIndex(FuzzyLimits())
    fresh = bench.restarted(1, again)
    assert found(fresh, again, 3) == before
    fresh.post(3, 1, seq=1)  # its parent is plain, as it was
    assert len(found(fresh, again, 4)) == 4

    without = bench.restarted(1)
    assert without.depths(3) == {"pod-a": 3}
    asyncio.run(without.keeper.save())
    empty = FuzzyIndex(FuzzyLimits())
    fresh = without.restarted(1, empty)
    assert (fresh.depths(3), found(fresh, empty, 3)) == ({"pod-a": 3}, [])

    asyncio.run(bench.keeper.save())
    other = FuzzyIndex(FuzzyLimits(shingle=2))
    fresh = bench.restarted(1, other)
    assert (fresh.depths(3), found(fresh, other, 3)) == ({"pod-a": 3}, [])


def test_every_byte_of_a_snapshot_with_contents_counts(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "snapshot", contents=FuzzyIndex(FuzzyLimits()))
    bench.post(0, 3, seq=0)
    asyncio.run(bench.keeper.save())
    content = bench.path.read_bytes()
    for at in range(len(content)):
        bench.path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        with pytest.raises(SnapshotRefused):
            SnapshotReader(bench.path)
