"""The service over a real index: the same tests over the plain-Python oracle and over the native core."""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from app.config import Settings
from app.errors import BatchRejected, InvalidInput, LimitExceeded, UnknownPod
from app.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Envelope,
    Event,
    EventBatch,
    RejectedEvent,
    Tier,
)
from app.index.interface import Index
from app.index.prefix_index import IndexLimits, PrefixIndex
from app.ingest.vllm import decode_batch, plain_batch
from app.pods import PodSpec, SourceState
from app.service import BatchResult, IndexerService, MatchQuery, MatchResult, MatchRow, index_limits
from tests.reference import ReferenceIndex

SIZE = 4  # tokens a block


def uint64s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def tokens(count: int, first: int = 0) -> bytes:
    """The prompt 0, 1, 2, ... from token `first` on."""
    return struct.pack(f"<{count}I", *range(first, first + count))


def stored(first: int, count: int = 1, *, size: int = SIZE, name: int = 100, **more: Any) -> BlockStored:
    """Blocks `first` on of the prompt; block i is named name + i."""
    return BlockStored(
        block_hashes=uint64s(*range(name + first, name + first + count)),
        parent_block_hash=name + first - 1 if first else None,
        token_ids=tokens(count * size, first * size),
        block_size=size,
        **more,
    )


def removed(*names: int, **more: Any) -> BlockRemoved:
    return BlockRemoved(block_hashes=uint64s(*names), **more)


def batch(*events: Event, **more: Any) -> EventBatch:
    return EventBatch(events=events, positions=tuple(range(len(events))), **more)


BAD = RejectedEvent(index=0, reason="type", detail="no such event")


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class Bench:
    """A service on a clock that stands still until it is moved."""

    def __init__(self, make_index: Callable[[IndexLimits], Index], **settings: Any) -> None:
        self.settings = Settings(**{"http_silence_deadline_s": 60.0, "ttl_s": 600.0, **settings})
        self.clock = Clock()
        self.index = make_index(index_limits(self.settings))
        self.service = IndexerService(self.settings, self.index, clock=self.clock)

    def post(
        self,
        *events: Event,
        pod: str = "a",
        model: str | None = "m",
        dp_rank: int = 0,
        seq: int | None = None,
        lora: str | None = None,
        **more: Any,
    ) -> BatchResult:
        envelope = Envelope(pod=pod, model=model, dp_rank=dp_rank, seq=seq, lora=lora)
        return self.service.post(envelope, batch(*events, **more))

    def match(self, count: int = 40, **more: Any) -> MatchResult:
        return self.service.match(MatchQuery(**{"model": "m", "token_ids": tokens(count), **more}))

    def row(self, pod: str = "a", dp_rank: int = 0, **more: Any) -> MatchRow | None:
        rows = [r for r in self.match(**more).matches if (r.pod, r.dp_rank) == (pod, dp_rank)]
        assert len(rows) <= 1
        return rows[0] if rows else None

    def depth(self, pod: str = "a", dp_rank: int = 0, **more: Any) -> int:
        row = self.row(pod, dp_rank, **more)
        return 0 if row is None else row.matched_blocks

    def state(self, pod: str = "a", dp_rank: int = 0) -> SourceState:
        return self.service.pod(pod).sources[dp_rank].state


MakeBench = Callable[..., Bench]


@pytest.fixture(params=[ReferenceIndex, PrefixIndex], ids=["reference", "native"])
def make(request: pytest.FixtureRequest) -> MakeBench:
    def make_bench(**settings: Any) -> Bench:
        return Bench(request.param, **settings)

    return make_bench


@pytest.fixture
def bench(make: MakeBench) -> Bench:
    return make()


# -- pods


def test_first_batch_registers_the_pod(bench: Bench) -> None:
    assert bench.post(stored(0, 3)) == BatchResult(accepted=1, stored_blocks=3)
    assert bench.service.pod("a").spec == PodSpec(name="a", model="m")
    assert bench.depth() == 3


def test_first_batch_of_an_unknown_pod_must_name_the_model(bench: Bench) -> None:
    with pytest.raises(InvalidInput, match="must name the model") as caught:
        bench.post(stored(0), model=None)
    assert caught.value.field == "model"
    assert bench.service.pods == {}
    bench.post(stored(0))
    assert bench.post(stored(1), model=None).stored_blocks == 1


def test_another_model_than_the_pods_is_refused(bench: Bench) -> None:
    bench.post(stored(0))
    with pytest.raises(InvalidInput, match="'a' serves 'm', not 'n'"):
        bench.post(stored(1), model="n")
    assert bench.depth() == 1


def test_pods_and_ranks_are_bounded_and_the_bound_is_named(make: MakeBench) -> None:
    bench = make(pods_max=1, dp_ranks_max=2)
    bench.post(stored(0))
    with pytest.raises(LimitExceeded) as caught:
        bench.post(stored(0), pod="b")
    assert caught.value.bound == "pods_max"
    with pytest.raises(LimitExceeded) as caught:
        bench.post(stored(0), dp_rank=2)
    assert caught.value.bound == "dp_ranks_max"
    with pytest.raises(LimitExceeded):
        bench.service.register(PodSpec(name="a", model="m", dp_size=3))
    with pytest.raises(InvalidInput):
        bench.post(stored(0), dp_rank=-1)
    assert list(bench.service.pods) == ["a"]
    assert list(bench.service.pods["a"].sources) == [0]


class Follower:
    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def pod_added(self, spec: PodSpec) -> None:
        self.heard.append(("added", spec.name))

    def pod_removed(self, name: str) -> None:
        self.heard.append(("removed", name))


def test_registration_is_idempotent_and_listeners_hear_of_changes_only(bench: Bench) -> None:
    follower = Follower()
    bench.service.listeners.append(follower)
    spec = PodSpec(name="a", model="m", zmq_endpoint="tcp://one:5557", dp_size=2)
    first = bench.service.register(spec)
    assert list(first.sources) == [0, 1]
    bench.post(stored(0, 2))
    assert bench.service.register(spec) is first
    assert follower.heard == [("added", "a")]
    assert bench.depth() == 2


@pytest.mark.parametrize(
    "change",
    [
        {"zmq_endpoint": "tcp://two:5557"},
        {"replay_endpoint": "tcp://one:5558"},
        {"model": "n"},
        {"lora": "tuned"},
        {"block_size": 8},
        {"dp_size": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_changed_registration_starts_empty(bench: Bench, change: dict[str, Any]) -> None:
    follower = Follower()
    bench.service.listeners.append(follower)
    spec = {"name": "a", "model": "m", "zmq_endpoint": "tcp://one:5557"}
    bench.service.register(PodSpec(**spec))  # type: ignore[arg-type]
    bench.post(stored(0, 2))
    bench.service.register(PodSpec(**{**spec, **change}))
    assert bench.depth() == 0
    assert follower.heard == [("added", "a"), ("removed", "a"), ("added", "a")]


def test_declaring_what_is_so_already_keeps_what_the_pod_holds(bench: Bench) -> None:
    bench.post(stored(0, 2))
    bench.post(stored(0, 1), dp_rank=3)
    bench.service.register(PodSpec(name="a", model="m", block_size=SIZE, dp_size=2))
    assert (bench.depth(), bench.depth(dp_rank=3)) == (2, 1)
    assert sorted(bench.service.pod("a").sources) == [0, 1, 3]
    bench.post(stored(0, 2), dp_rank=1)
    bench.service.register(PodSpec(name="a", model="m", block_size=SIZE, dp_size=1))
    assert (bench.depth(), bench.depth(dp_rank=1), bench.depth(dp_rank=3)) == (2, 0, 1)


def test_dropped_pod_holds_nothing_and_is_unknown(bench: Bench) -> None:
    follower = Follower()
    bench.service.listeners.append(follower)
    bench.post(stored(0, 2))
    bench.post(stored(0, 2), pod="b")
    bench.service.drop_pod("a")
    assert [row.pod for row in bench.match().matches] == ["b"]
    assert follower.heard[-1] == ("removed", "a")
    for call in (
        lambda: bench.service.drop_pod("a"),
        lambda: bench.service.pod("a"),
        lambda: bench.service.blocks_by_tier("a", 0),
        lambda: bench.service.apply("a", 0, batch(stored(0)), seq=0),
        lambda: bench.service.add_speculative("a", 0, "m", None, b"", 1.0, None),
        lambda: bench.service.set_source_state("a", 0, SourceState.DOWN),
    ):
        with pytest.raises(UnknownPod):
            call()


def test_impossible_registrations_are_refused(bench: Bench) -> None:
    for spec in (
        PodSpec(name="", model="m"),
        PodSpec(name="a", model=""),
        PodSpec(name="a", model="m", block_size=0),
        PodSpec(name="a", model="m", dp_size=0),
    ):
        with pytest.raises(InvalidInput):
            bench.service.register(spec)
    assert bench.service.pods == {}


# -- batches


def test_batch_seen_before_changes_nothing(bench: Bench) -> None:
    bench.post(stored(0, 2), seq=7)
    bench.clock.seconds += 5
    assert bench.post(stored(0, 2), seq=7) == BatchResult(duplicate=True)
    assert bench.post(removed(100), seq=3) == BatchResult(duplicate=True)
    row = bench.row()
    assert row is not None
    assert (row.matched_blocks, row.last_event_age_s, row.state) == (2, 5.0, SourceState.LIVE)
    bench.post(removed(100, 101), seq=8)
    assert bench.depth() == 0  # the copies were not counted twice


def test_what_is_posted_beside_a_stream_is_doubted_and_has_no_number(bench: Bench) -> None:
    """A dump of another indexer, say: what it tells may be gone by now, and the stream will not take it back."""
    bench.service.register(PodSpec(name="a", model="m", zmq_endpoint="tcp://one:5557"))
    bench.service.apply("a", 0, batch(stored(0, 2)), seq=6, digest=66)
    bench.post(stored(0, tier=Tier.CPU), seq=2)
    source = bench.service.pod("a").sources[0]
    assert bench.state() is SourceState.LIVE, "a connector's own tier is not the stream's"
    bench.post(seq=9)
    assert (source.state, source.gaps, source.duplicates) == (SourceState.LIVE, 0, 0)
    assert bench.service.position("a", 0) == (6, 66)
    bench.post(stored(2))
    assert (source.state, bench.depth()) == (SourceState.DEGRADED, 3)
    assert "beside its stream" in source.cause
    bench.post(AllBlocksCleared())
    assert bench.state() is SourceState.DEGRADED, "nor is a clear its engine's"
    bench.service.reset_source("a", 0, restarted=True)
    assert bench.state() is SourceState.LIVE


def test_a_first_batch_that_said_nothing_usable_and_comes_again_is_no_restart(bench: Bench) -> None:
    def first() -> BatchResult:
        return bench.service.post(Envelope(pod="a", model="m", seq=0, digest=7), batch(ignored=1))

    first()
    bench.post(stored(0), seq=1)
    assert first().duplicate
    assert (bench.depth(), bench.service.pod("a").sources[0].restarts) == (1, 0)


def test_a_number_0_without_an_event_tells_nothing_of_the_engine_that_sent_it(bench: Bench) -> None:
    """A dump ends so, and an engine may begin so each time: were it taken for the batch from before, all that follows
    it would pass for seen."""

    def first() -> BatchResult:
        return bench.service.post(Envelope(pod="a", model="m", seq=0, digest=7), batch())

    first()
    bench.post(stored(0, 2), seq=1)
    assert not first().duplicate
    assert (bench.depth(), bench.service.pod("a").sources[0].restarts) == (0, 1)
    assert bench.post(stored(0), seq=1).stored_blocks == 1


def test_what_was_number_0_before_a_reset_is_no_proof_behind_it(bench: Bench) -> None:
    def first() -> BatchResult:
        return bench.service.post(Envelope(pod="a", model="m", seq=0, digest=7), batch(stored(0)))

    first()
    bench.service.reset_source("a", 0, restarted=False)
    bench.post(stored(0, 2), seq=5)
    assert first().stored_blocks == 1, (
        "it begins like an engine long ago, and is another than the one of number 5"
    )
    assert (bench.depth(), bench.service.pod("a").sources[0].restarts) == (1, 1)
    assert first().duplicate


def test_a_seen_number_stamped_later_than_all_before_is_another_run(bench: Bench) -> None:
    """An engine restarted and its number 0 got lost: what it says passes for seen, and the picture is not its own."""
    for seq in range(8):
        bench.post(stored(seq), seq=seq, ts=100.0 + seq)
    assert bench.post(stored(0), seq=1, ts=200.0).duplicate
    source = bench.service.pod("a").sources[0]
    assert (source.state, bench.depth(), source.last_seq) == (SourceState.DEGRADED, 8, 7)
    assert source.cause.startswith("number 1 came again, stamped later than all up to number 7: ")
    bench.post(AllBlocksCleared(), stored(0), seq=8, ts=201.0)
    assert (source.state, bench.depth()) == (SourceState.LIVE, 1)
    bench.post(stored(1), seq=5, ts=202.0)
    bench.service.post(Envelope(pod="a", model="m", seq=0, digest=7), batch(stored(2), ts=203.0))
    assert (source.state, source.last_seq, source.restarts) == (SourceState.LIVE, 0, 1)


@pytest.mark.parametrize(
    ("seq", "ts"),
    [(3, 103.0), (3, 107.0), (7, 200.0), (3, None), (None, 200.0), (0, 100.0)],
    ids=["late", "late, at the same time", "the last one again", "no stamp", "no number", "the first one"],
)
def test_a_late_duplicate_says_nothing_of_the_engine(bench: Bench, seq: int | None, ts: float | None) -> None:
    for number in range(8):
        bench.post(stored(number), seq=number, ts=100.0 + number)
    bench.post(stored(0), seq=seq, ts=ts)
    assert bench.state() is SourceState.LIVE


def test_stamps_of_a_clock_that_was_set_back_are_no_restart(bench: Bench) -> None:
    for seq, ts in enumerate([100.0, 101.0, 50.0, 51.0]):
        bench.post(stored(seq), seq=seq, ts=ts)
    bench.post(stored(1), seq=1, ts=101.0)
    assert bench.state() is SourceState.LIVE


def test_without_stamps_a_seen_number_stays_a_duplicate(bench: Bench) -> None:
    bench.post(stored(0), seq=5, ts=1.0)
    bench.post(stored(0), seq=6)
    bench.post(stored(0), seq=3, ts=2.0)
    assert bench.state() is SourceState.LIVE
    bench.post(stored(0), seq=7, ts=5.0)
    bench.post(stored(0), seq=3, ts=4.0)
    assert bench.state() is SourceState.LIVE
    bench.post(stored(0), seq=3, ts=6.0)
    assert bench.state() is SourceState.DEGRADED


def test_a_batch_without_a_number_is_of_no_run(bench: Bench) -> None:
    """What is posted beside the numbered ones is not among those that a number can come again of."""
    for seq in (5, 6):
        bench.post(stored(0), seq=seq, ts=100.0 + seq)
    bench.post(stored(0), ts=500.0)
    bench.post(stored(0))
    bench.post(stored(0), seq=5, ts=105.0)
    assert bench.state() is SourceState.LIVE
    bench.post(stored(0), seq=5, ts=200.0)
    assert bench.state() is SourceState.DEGRADED


def test_stamps_are_of_one_run_only(bench: Bench) -> None:
    bench.post(stored(0), seq=5, ts=500.0)
    bench.service.reset_source("a", 0, restarted=True)
    for seq in (1, 2):
        bench.post(stored(0), seq=seq, ts=seq)
    bench.post(stored(0), seq=1, ts=3.0)
    assert bench.state() is SourceState.DEGRADED, "the 500 was another run's"


def test_gap_degrades_until_the_engine_clears(bench: Bench) -> None:
    bench.post(stored(0), seq=0)
    bench.post(stored(1), seq=3)
    source = bench.service.pod("a").sources[0]
    assert (source.state, source.gaps, source.last_seq) == (SourceState.DEGRADED, 1, 3)
    row = bench.row()
    assert row is not None
    assert row.state is SourceState.DEGRADED
    bench.post(AllBlocksCleared(), stored(0), seq=4)
    assert (source.state, bench.depth()) == (SourceState.LIVE, 1)


def test_clear_does_not_heal_a_source_that_offloads(bench: Bench) -> None:
    bench.post(stored(0), stored(0, tier=Tier.CPU), seq=0)
    bench.post(seq=2)
    bench.post(AllBlocksCleared(), seq=3)
    assert bench.state() is SourceState.DEGRADED
    assert bench.depth() == 1  # from the CPU
    bench.service.reset_source("a", 0, restarted=True)
    assert (bench.state(), bench.depth()) == (SourceState.LIVE, 0)


@pytest.mark.parametrize("shows", [stored(0, tier=Tier.CPU), removed(900, tier=Tier.DISK)])
def test_a_source_that_turns_out_to_offload_was_not_healed_by_a_clear(bench: Bench, shows: Event) -> None:
    """What was lost before the clear may have been of the other tier."""
    bench.post(stored(0), seq=0)
    bench.post(seq=2)
    bench.post(AllBlocksCleared(), seq=3)
    assert bench.state() is SourceState.LIVE
    bench.post(shows, seq=4)
    source = bench.service.pod("a").sources[0]
    assert bench.state() is SourceState.DEGRADED
    assert source.cause == "a clear says nothing of its other tiers: batches 1 to 1 never came"
    bench.post(AllBlocksCleared(), seq=5)
    assert bench.state() is SourceState.DEGRADED
    bench.service.reset_source("a", 0, restarted=True)
    bench.post(stored(0, tier=Tier.CPU), seq=0)
    assert bench.state() is SourceState.LIVE, "what another run lost is no matter"


def test_batch_without_a_usable_event_is_refused_whole(bench: Bench) -> None:
    with pytest.raises(BatchRejected, match="event 0: no such event") as caught:
        bench.post(rejected=(BAD,), seq=0)
    assert caught.value.rejected == (BAD,)
    assert bench.service.pods == {}
    bench.post(stored(0), seq=0)
    with pytest.raises(BatchRejected, match="block_size 8 does not match 4"):
        bench.post(stored(0, size=8), seq=1)
    source = bench.service.pod("a").sources[0]
    assert (source.last_seq, source.rejected, bench.depth()) == (0, 1, 1)
    assert bench.service.stats()["rejected"] == {"type": 1, "block_size": 1}


def test_bad_event_does_not_lose_its_batch(bench: Bench) -> None:
    late = EventBatch(
        events=(stored(0), stored(0, size=8), stored(1)),
        positions=(0, 2, 3),
        rejected=(_bad_at(1),),
        ignored=2,
    )
    result = bench.service.post(Envelope(pod="a", model="m", seq=0), late)
    assert (result.accepted, result.stored_blocks) == (4, 2)
    assert [(event.index, event.reason) for event in result.rejected] == [(1, "type"), (2, "block_size")]
    assert bench.depth() == 2


def test_events_that_are_skipped_are_told_now_and_then(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine is not answered. Each reason once, and the 1st, 2nd, 4th, 8th ... of a source."""
    bench.service.register(PodSpec(name="a", model="m", block_size=SIZE))
    for seq in range(5):
        bench.service.apply("a", 0, batch(stored(0), rejected=(BAD,)), seq=seq)
    bench.service.apply("a", 0, batch(stored(0), stored(0, size=8)), seq=5)
    told = [record for record in caplog.records if record.name == "app.service.batches"]
    assert [record.getMessage() for record in told] == [
        f"source a rank 0: event {BAD.index} of a batch is skipped (type): no such event; 1 of this source in all",
        f"source a rank 0: event {BAD.index} of a batch is skipped (type): no such event; 2 of this source in all",
        f"source a rank 0: event {BAD.index} of a batch is skipped (type): no such event; 4 of this source in all",
        "source a rank 0: event 1 of a batch is skipped (block_size): "
        "block_size 8 does not match 4, which was declared for this source or came first; 6 of this source in all",
    ]
    assert (vars(told[0])["pod"], vars(told[0])["dp_rank"]) == ("a", 0)


@pytest.mark.parametrize(
    ("replay_endpoint", "remedy"),
    [("tcp://h:2", "none needed: a replay is under way"), (None, "none needed: its next batch tells")],
)
def test_nobody_is_told_of_a_replay_where_there_is_none(
    bench: Bench, caplog: pytest.LogCaptureFixture, replay_endpoint: str | None, remedy: str
) -> None:
    caplog.set_level(logging.INFO, logger="app.service.registry")
    bench.service.register(
        PodSpec(name="a", model="m", zmq_endpoint="tcp://h:1", replay_endpoint=replay_endpoint)
    )
    bench.service.set_source_state("a", 0, SourceState.CATCHING_UP, cause="connected")
    assert vars(caplog.records[-1])["remedy"].startswith(remedy)


def _bad_at(index: int) -> RejectedEvent:
    return RejectedEvent(index=index, reason="type", detail="no such event")


def test_batch_of_ignored_events_only_is_accepted(bench: Bench) -> None:
    assert bench.post(rejected=(BAD,), ignored=1).accepted == 1
    assert bench.post().accepted == 0


def test_block_size_of_the_gpu_is_learned_once_and_forgotten_on_reset(bench: Bench) -> None:
    bench.post(stored(0))
    bench.post(stored(0, 1, size=8, name=500, tier=Tier.CPU))  # offload tiers are free
    with pytest.raises(BatchRejected):
        bench.post(stored(0, size=8))
    bench.service.reset_source("a", 0, restarted=True)
    assert bench.post(stored(0, size=8)).stored_blocks == 1


def test_declared_block_size_survives_a_reset(bench: Bench) -> None:
    bench.service.register(PodSpec(name="a", model="m", block_size=SIZE))
    bench.service.reset_source("a", 0, restarted=True)
    with pytest.raises(BatchRejected):
        bench.post(stored(0, size=8))


def test_stream_batches_are_never_refused(bench: Bench) -> None:
    bench.service.register(PodSpec(name="a", model="m", block_size=SIZE))
    result = bench.service.apply("a", 5, batch(stored(0, size=8)), seq=9)
    assert (result.accepted, len(result.rejected)) == (0, 1)
    assert bench.service.pod("a").sources[5].last_seq == 9


def test_orphans_are_told_and_chained(bench: Bench) -> None:
    assert bench.post(stored(1, 2)) == BatchResult(accepted=1, orphans=2)
    assert bench.post(stored(3), stored(0)) == BatchResult(accepted=2, stored_blocks=4)
    assert bench.depth() == 4
    assert bench.service.pod("a").sources[0].orphans == 3


def test_dropped_orphans_degrade_the_source_they_belong_to(make: MakeBench) -> None:
    bench = make(orphan_blocks_max=1)
    bench.post(stored(1), pod="a")
    bench.post(stored(1), pod="b")
    assert (bench.state("a"), bench.state("b")) == (SourceState.DEGRADED, SourceState.LIVE)
    assert bench.service.pod("a").sources[0].orphans_dropped == 1


def test_what_was_lost_before_a_clear_does_not_degrade_what_follows(make: MakeBench) -> None:
    bench = make(orphan_blocks_max=1)
    bench.post(stored(1, 2), AllBlocksCleared(), stored(0))
    assert (bench.state(), bench.depth()) == (SourceState.LIVE, 1)
    bench.post(AllBlocksCleared(), stored(1, 2))
    assert bench.state() is SourceState.DEGRADED


def test_placeholders_follow_a_name_to_another_tier(bench: Bench) -> None:
    bench.post(stored(0, 2))
    offloaded = BlockStored(
        block_hashes=uint64s(100, 101, 7), parent_block_hash=None, token_ids=b"", block_size=0, tier=Tier.CPU
    )
    assert bench.post(offloaded, removed(100, 101)).stored_blocks == 2
    row = bench.row()
    assert row is not None
    assert row.tiers == {"gpu": 0, "cpu": 2, "disk": 2, "external": 2}
    assert bench.service.pod("a").sources[0].unknown_blocks == 1
    assert bench.service.blocks_by_tier("a", 0) == {"gpu": 0, "cpu": 2, "disk": 0, "external": 0}
    assert bench.service.blocks_by_tier("a", 9) == {}


def test_adapter_of_the_event_then_of_the_batch_then_of_the_pod(bench: Bench) -> None:
    bench.service.register(PodSpec(name="a", model="m", lora="pod"))
    bench.post(stored(0), lora="batch")
    bench.post(stored(0, lora="event"), lora="batch")
    bench.post(stored(0))
    for lora, depth in (("pod", 1), ("batch", 1), ("event", 1), (None, 0), ("", 0)):
        assert bench.depth(lora=lora) == depth


def test_removal_without_a_source_reaches_every_pod_of_the_model(bench: Bench) -> None:
    for pod, model in (("a", "m"), ("b", "m"), ("c", "n")):
        bench.post(stored(0, 2), pod=pod, model=model)
    assert bench.service.remove_everywhere("m", None, removed(100)) == 2
    assert bench.match().matches == ()
    assert bench.depth("c", model="n") == 2


# -- removal of prefixes


def test_remove_blocks_narrows_by_rank_tier_and_adapter(bench: Bench) -> None:
    def fill() -> None:
        bench.post(AllBlocksCleared(), stored(0, 3), stored(0, 2, name=300, lora="tuned"))
        bench.post(AllBlocksCleared(), stored(0, 3), dp_rank=1)

    def remove(
        *,
        model: str | None = None,
        lora: str | None = None,
        dp_rank: int | None = None,
        tier: Tier | None = None,
    ) -> int:
        return bench.service.remove_blocks("a", model=model, lora=lora, dp_rank=dp_rank, tier=tier)

    fill()
    assert remove(lora="tuned") == 2
    assert (bench.depth(lora="tuned"), bench.depth(), bench.depth(dp_rank=1)) == (0, 3, 3)
    fill()
    assert remove(lora="") == 6
    assert (bench.depth(lora="tuned"), bench.depth(), bench.depth(dp_rank=1)) == (2, 0, 0)
    fill()
    assert remove(dp_rank=1) == 3
    assert (bench.depth(lora="tuned"), bench.depth(), bench.depth(dp_rank=1)) == (2, 3, 0)
    assert remove(tier=Tier.CPU) == 0
    assert remove(model="m") == 5
    assert bench.match().matches == ()
    with pytest.raises(InvalidInput):
        remove(model="n")
    with pytest.raises(InvalidInput):
        remove(dp_rank=2)


# -- trust


def test_loss_outlives_a_reconnect_and_down_outweighs_it(bench: Bench) -> None:
    bench.service.register(PodSpec(name="a", model="m", zmq_endpoint="tcp://one:5557"))
    say = bench.service.set_source_state
    seen = []
    for state in (SourceState.LIVE, SourceState.DEGRADED, SourceState.DOWN, SourceState.LIVE):
        say("a", 0, state, cause="test")
        seen.append(bench.state())
    assert seen == [SourceState.LIVE, SourceState.DEGRADED, SourceState.DOWN, SourceState.DEGRADED]
    say("a", 0, SourceState.LIVE, gaps=2, replays=3)
    source = bench.service.pod("a").sources[0]
    assert (source.gaps, source.replays) == (2, 3)
    bench.service.reset_source("a", 0, restarted=True)
    assert (source.state, source.restarts) == (SourceState.LIVE, 1)


def test_a_clear_within_a_replay_that_lost_batches_does_not_end_the_replay(bench: Bench) -> None:
    bench.service.register(PodSpec(name="a", model="m", zmq_endpoint="tcp://one:5557"))
    bench.service.set_source_state("a", 0, SourceState.CATCHING_UP, cause="replay from 0")
    bench.service.set_source_state("a", 0, SourceState.DEGRADED, cause="the replay no longer has 0..4")
    assert bench.state() is SourceState.CATCHING_UP
    bench.service.apply("a", 0, batch(AllBlocksCleared(), stored(0)), seq=5)
    assert bench.state() is SourceState.CATCHING_UP, "there is more to come"
    bench.service.set_source_state("a", 0, SourceState.LIVE, cause="the stream is whole from here on")
    assert bench.state() is SourceState.LIVE


def test_down_source_is_listed_with_its_state_until_it_is_reset(bench: Bench) -> None:
    bench.post(stored(0, 2), seq=4)
    bench.service.set_source_state("a", 0, SourceState.DOWN, cause="test")
    row = bench.row()
    assert row is not None
    assert (row.matched_blocks, row.state) == (2, SourceState.DOWN)
    bench.service.reset_source("a", 0, restarted=False)
    assert bench.row() is None
    assert bench.state() is SourceState.DOWN
    assert bench.service.pod("a").sources[0].last_seq is None


def test_a_timer_may_rest_when_a_sweep_is_done(bench: Bench) -> None:
    bench.post(stored(0, 2))
    while not bench.service.is_at_rest:
        bench.service.tick()
    bench.clock.seconds += bench.settings.sweep_pause_s
    assert not bench.service.is_at_rest


def test_what_is_dead_is_swept_in_parts() -> None:
    bench = Bench(PrefixIndex)
    bench.post(stored(0, 5_000))
    bench.service.drop_pod("a")
    left = [bench.index.stats().prefixes]
    while left[-1]:
        left += [bench.index.stats().prefixes for _ in bench.service.tick_parts()]
    assert left[0] == 5_000
    assert max(before - after for before, after in itertools.pairwise(left)) <= 512


def test_silent_source_holds_nothing_past_its_deadline(bench: Bench) -> None:
    bench.post(stored(0, 2), pod="a", seq=9)
    bench.clock.seconds += 30
    bench.post(stored(0, 2), pod="b")
    bench.clock.seconds += 29.9
    bench.service.tick()
    assert {row.pod for row in bench.match().matches} == {"a", "b"}
    bench.clock.seconds += 0.1
    bench.service.tick()
    assert [row.pod for row in bench.match().matches] == ["b"]
    assert bench.state("a") is SourceState.DOWN
    bench.post(stored(0, 1), pod="a", seq=0)  # its numbers may have begun again
    assert (bench.depth("a"), bench.state("a")) == (1, SourceState.DEGRADED)


def test_who_speaks_again_does_not_shield_who_fell_silent(bench: Bench) -> None:
    bench.post(stored(0), pod="a")
    bench.post(stored(0), pod="b")
    bench.clock.seconds += 30
    bench.post(stored(1), pod="a")
    bench.clock.seconds += 30
    bench.service.tick()
    assert (bench.state("a"), bench.state("b")) == (SourceState.LIVE, SourceState.DOWN)


def test_silent_source_comes_back_by_a_stream_too(bench: Bench) -> None:
    bench.post(stored(0, 2))
    bench.clock.seconds += 61
    bench.service.tick()
    bench.service.apply("a", 0, batch(stored(0)), seq=None)
    assert (bench.depth(), bench.state()) == (1, SourceState.DEGRADED)


def test_silence_is_no_fault_of_a_source_with_a_stream(bench: Bench) -> None:
    bench.service.register(PodSpec(name="a", model="m", zmq_endpoint="tcp://one:5557"))
    bench.service.apply("a", 0, batch(stored(0, 2)), seq=0)
    bench.clock.seconds += 599
    bench.service.tick()
    assert (bench.depth(), bench.state()) == (2, SourceState.LIVE)


def test_dropped_pod_leaves_the_silence_queue(bench: Bench) -> None:
    bench.post(stored(0))
    bench.service.drop_pod("a")
    bench.clock.seconds += 61
    bench.service.tick()
    assert bench.service.stats()["pods"] == 0


def test_one_tick_resets_a_bounded_number_of_silent_sources(bench: Bench) -> None:
    for i in range(100):
        bench.post(stored(0), pod=f"pod-{i:03}")
    bench.clock.seconds += 61
    bench.service.tick()
    down = [name for name in bench.service.pods if bench.state(name) is SourceState.DOWN]
    assert down == [f"pod-{i:03}" for i in range(64)]
    bench.service.tick()
    assert bench.match().matches == ()


def test_each_change_of_state_is_one_log_line(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="app.service.registry")
    bench.post(stored(0), seq=0)
    bench.post(stored(1), seq=1)
    assert caplog.records == []
    bench.post(stored(2), seq=4)
    bench.post(stored(3), seq=9)
    assert len(caplog.records) == 1
    fields = vars(caplog.records[0])
    assert (fields["pod"], fields["dp_rank"], fields["from"], fields["to"]) == ("a", 0, "live", "degraded")
    assert fields["cause"] == "batches 2 to 3 never came"
    assert "replay endpoint" in fields["remedy"]
    bench.clock.seconds += 61
    bench.service.tick()
    bench.post(stored(0), seq=0)
    assert [vars(record)["to"] for record in caplog.records] == ["degraded", "down", "degraded"]


# -- queries


def test_the_cause_of_a_state_is_kept_with_it(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="app.service.registry")
    bench.service.register(PodSpec("a", "m", zmq_endpoint="tcp://h:1"))
    source = bench.service.pod("a").sources[0]

    def say(state: SourceState, cause: str) -> tuple[SourceState, str]:
        bench.service.set_source_state("a", 0, state, cause=cause)
        return source.state, source.cause

    assert source.cause == ""
    assert say(SourceState.DOWN, "connecting") == (SourceState.DOWN, "connecting")
    assert say(SourceState.DOWN, "no address") == (SourceState.DOWN, "no address")
    assert say(SourceState.DOWN, "no address") == (SourceState.DOWN, "no address")
    assert say(SourceState.CATCHING_UP, "replay") == (SourceState.CATCHING_UP, "replay")
    assert say(SourceState.DEGRADED, "batch 3 is lost") == (SourceState.CATCHING_UP, "replay")
    assert say(SourceState.LIVE, "whole from here on") == (SourceState.DEGRADED, "batch 3 is lost")
    bench.service.reset_source("a", 0, restarted=True)
    assert (source.state, source.cause) == (SourceState.LIVE, "whole from here on")
    said = [record.__dict__["cause"] for record in caplog.records]
    assert said == ["connecting", "no address", "replay", "batch 3 is lost", "the engine restarted"]


def test_match_counts_tokens_and_full_blocks(bench: Bench) -> None:
    bench.post(stored(0, 3))
    answer = bench.match(18)
    assert (answer.block_size, answer.tokens, answer.blocks) == (SIZE, 18, 4)
    row = answer.matches[0]
    assert (row.matched_blocks, row.matched_tokens, row.reusable_tokens, row.percent) == (3, 12, 12, 75.0)
    assert bench.match(12).matches[0].reusable_tokens == 8
    assert bench.match(3).matches == ()


def test_unknown_model_has_no_rows_and_a_block_size_all_the_same(bench: Bench) -> None:
    answer = bench.match(40)
    assert (answer.block_size, answer.blocks, answer.matches) == (16, 2, ())
    bench.service.register(PodSpec(name="a", model="m", block_size=8))
    bench.service.register(PodSpec(name="b", model="m", block_size=32))
    assert bench.match(40).block_size == 8
    assert bench.match(40, block_size=5).block_size == 5
    assert bench.service.unit("m", None, None) == 8


def test_pods_filter(bench: Bench) -> None:
    for pod in ("a", "b", "c"):
        bench.post(stored(0), pod=pod)
    assert [row.pod for row in bench.match(pods=frozenset({"c", "a", "x"})).matches] == ["a", "c"]
    assert bench.match(pods=frozenset()).matches == ()


def test_engine_blocks_and_offloaded_chunks_are_merged(bench: Bench) -> None:
    bench.post(stored(0, 3))
    bench.post(stored(0, 2, size=16, name=900, tier=Tier.CPU))
    answer = bench.match(40)
    assert (answer.block_size, answer.blocks) == (SIZE, 10)
    row = answer.matches[0]
    assert (row.matched_blocks, row.matched_tokens, row.reusable_tokens) == (8, 32, 32)
    assert row.tiers == {"gpu": 3, "cpu": 8, "disk": 8, "external": 8}
    assert bench.match(40, block_size=16).matches[0].tiers["gpu"] == 0
    assert bench.match(40, block_size=SIZE).matches[0].matched_blocks == 3


def test_pods_of_different_block_sizes_are_compared_in_tokens(bench: Bench) -> None:
    bench.post(stored(0, 3), pod="a")
    bench.post(stored(0, 2, size=8), pod="b")
    answer = bench.match(17)
    assert [(row.pod, row.matched_tokens, row.matched_blocks) for row in answer.matches] == [
        ("b", 16, 4),
        ("a", 12, 3),
    ]
    assert bench.match(16).matches[0].reusable_tokens == 8  # blocks of 8, and not the last token


def test_hashes_ask_the_context_of_their_block_size(bench: Bench) -> None:
    bench.post(stored(0, 3))
    hashes = bench.service.prefix_hashes("m", None, tokens(18), None, None)
    answer = bench.match(token_ids=None, prefix_hashes=hashes)
    assert (answer.tokens, answer.blocks, answer.matches[0].matched_blocks) == (16, 4, 3)
    bench.post(stored(0, 2, size=16, name=900, tier=Tier.CPU))
    assert bench.match(token_ids=None, prefix_hashes=hashes).matches[0].matched_blocks == 3
    chunks = bench.service.prefix_hashes("m", None, tokens(32), None, 16)
    assert bench.match(token_ids=None, prefix_hashes=chunks).matches == ()
    answer = bench.match(token_ids=None, prefix_hashes=chunks, block_size=16)
    assert (answer.block_size, answer.matches[0].matched_blocks) == (16, 2)


def test_included_hashes_are_those_of_the_answers_block_size(bench: Bench) -> None:
    bench.post(stored(0, 3))
    answer = bench.match(18, include_hashes=True)
    assert answer.prefix_hashes == bench.service.prefix_hashes("m", None, tokens(18), None, SIZE)
    assert len(answer.prefix_hashes) == 8 * 4
    assert bench.match(18).prefix_hashes is None
    hashes = answer.prefix_hashes
    assert bench.match(token_ids=None, prefix_hashes=hashes, include_hashes=True).prefix_hashes == hashes


def test_salt_of_the_first_block_is_asked_of_every_block_size(bench: Bench) -> None:
    salt = b"\x91\xa4salt"
    bench.post(stored(0, 2, extra_keys=(salt, b"")))
    bench.post(stored(0, 1, size=16, name=900, tier=Tier.CPU, extra_keys=(salt,)))
    assert bench.match().matches == ()
    row = bench.row(extra_keys=(salt,))
    assert row is not None
    assert row.tiers == {"gpu": 2, "cpu": 4, "disk": 4, "external": 4}
    row = bench.row(extra_keys=(salt, b""))
    assert row is not None
    assert row.tiers["cpu"] == 4
    bench.post(stored(0, 2, name=700, extra_keys=(salt, b"image")))
    row = bench.row(extra_keys=(salt, b"image"))  # an image cannot be placed on another grid
    assert row is not None
    assert row.tiers["cpu"] == 2


@pytest.mark.parametrize(
    "query",
    [{"token_ids": b"123"}, {"token_ids": None, "prefix_hashes": b"1234567"}, {"block_size": 0}],
    ids=["tokens", "hashes", "block_size"],
)
def test_queries_that_cannot_be_are_refused(bench: Bench, query: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        bench.match(**query)


def test_entry_expires_at_its_ttl_and_a_match_keeps_it(make: MakeBench) -> None:
    bench = make(ttl_s=10.0, http_silence_deadline_s=1e6)
    bench.post(stored(0, 2))
    bench.clock.seconds += 9.9
    assert bench.depth(count=4) == 1
    bench.clock.seconds += 0.1
    assert bench.depth() == 1
    bench.clock.seconds += 9.9
    bench.service.tick()
    assert bench.depth() == 1
    bench.clock.seconds += 10
    assert bench.depth() == 0


# -- speculation


def test_announced_blocks_are_shown_apart_and_expire_alone(bench: Bench) -> None:
    bench.post(stored(0, 2))
    hashes = bench.service.prefix_hashes("m", None, tokens(16), None, None)
    assert bench.service.add_speculative("a", 0, "m", None, hashes, 2.0, None) == 2
    bench.service.register(PodSpec(name="b", model="m"))
    assert bench.service.add_speculative("b", 1, "m", None, hashes, 2.0, None) == 4
    rows = {
        row.pod: (row.dp_rank, row.matched_blocks, row.speculative_blocks) for row in bench.match().matches
    }
    assert rows == {"a": (0, 2, 4), "b": (1, 0, 4)}
    bench.clock.seconds += 2.0
    rows = {
        row.pod: (row.dp_rank, row.matched_blocks, row.speculative_blocks) for row in bench.match().matches
    }
    assert rows == {"a": (0, 2, 2)}


def test_announcement_needs_a_possible_time_and_the_pods_model(make: MakeBench) -> None:
    bench = make(speculative_ttl_s_max=5.0)
    bench.post(stored(0))
    with pytest.raises(LimitExceeded) as caught:
        bench.service.add_speculative("a", 0, "m", None, uint64s(1), 5.1, None)
    assert caught.value.bound == "speculative_ttl_s_max"
    for ttl_s in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidInput):
            bench.service.add_speculative("a", 0, "m", None, uint64s(1), ttl_s, None)
    with pytest.raises(InvalidInput):
        bench.service.add_speculative("a", 0, "n", None, uint64s(1), 1.0, None)
    assert bench.service.add_speculative("a", 0, "m", None, uint64s(1), 0.001, None) == 1
    assert bench.service.add_speculative("a", 0, "m", None, uint64s(2), 5.0, None) == 1


def test_rows_with_fewer_blocks_than_asked_for_are_left_out(bench: Bench) -> None:
    for blocks, pod in enumerate(("a", "b", "c"), 1):
        bench.post(stored(0, blocks), pod=pod)
    assert [row.pod for row in bench.match(min_blocks=2).matches] == ["c", "b"]
    assert [row.pod for row in bench.match(min_blocks=2, top_k=1).matches] == ["c"]
    assert bench.match(min_blocks=4).matches == ()


# -- figures


def test_stats_add_up(bench: Bench) -> None:
    bench.post(stored(0, 3), removed(102), seq=0)
    bench.post(stored(0, 3), removed(102), seq=0)
    bench.post(stored(0, 1), AllBlocksCleared(), stored(1), pod="b", seq=0)
    bench.post(seq=5)
    bench.match(12)
    bench.match(12, model="other")
    bench.clock.seconds += 3
    stats = bench.service.stats()
    assert stats["uptime_s"] == 3.0
    assert (stats["pods"], stats["sources"]) == (2, {"live": 1, "catching_up": 0, "degraded": 1, "down": 0})
    assert stats["events"] == {"BlockStored": 3, "BlockRemoved": 1, "AllBlocksCleared": 1}
    assert stats["totals"] == {
        "batches": 3,
        "duplicates": 1,
        "ignored": 0,
        "stored_blocks": 4,
        "removed_blocks": 1,
        "unknown_blocks": 0,
        "orphans": 1,
        "orphans_dropped": 0,
        "gaps": 1,
        "replays": 0,
        "restarts": 0,
    }
    assert stats["queries"] == {"matches": 2, "matches_hit": 1, "tokens_asked": 24, "tokens_matched": 8}
    assert [(context["model"], context["block_size"]) for context in stats["contexts"]] == [("m", SIZE)]
    assert stats["index"]["orphan_blocks"] == 1


# -- batches that were read natively


def posted_natively(bench: Bench, *events: dict[str, Any], **more: Any) -> BatchResult | None:
    """None: it takes `post`."""
    plain = plain_batch()
    assert plain.read_msgpack(msgspec.msgpack.encode([None, list(events)]), 100) is not None
    return bench.service.post_plain(
        "a", plain, **{"model": "m", "dp_rank": 0, "seq": None, "lora": None, **more}
    )


def told(first: int, count: int = 1, *, size: int = SIZE, **more: Any) -> dict[str, Any]:
    """`stored` as an engine says it."""
    event = stored(first, count, size=size)
    return {
        "type": "BlockStored",
        "block_hashes": list(memoryview(event.block_hashes).cast("Q")),
        "parent_block_hash": event.parent_block_hash,
        "token_ids": list(memoryview(event.token_ids).cast("I")),
        "block_size": size,
        **more,
    }


def told_removed(*names: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), **more}


# Events, and how their batch is posted; what comes before is one batch with block 0.
SEQUELS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "stored": ([told(1, 3)], {}),
    "the same again": ([told(0)], {}),
    "stored and removed": ([told(1, 3), told_removed(102, 103), told(2, 2)], {}),
    "removed that nobody has": ([told_removed(100, 100, 7)], {}),
    "waits for its parent": ([told(3, 2), told(2), told(1)], {}),
    "too many wait": ([told(2, 4), told(7, 4), told(20, 12)], {}),
    "more wait than ever may": ([told(20, 12)], {}),
    "removed on another tier": ([told_removed(100, medium="CPU")], {}),
    "the next number": ([told(1)], {"seq": 6}),
    "without its model": ([told(1)], {"model": None}),
    "stamped": ([told(1)], {"seq": 6, "ts": 7.5}),
    "stamped, without a number": ([told(1)], {"ts": 7.5}),
}
REFUSED: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a number twice": ([told(1)], {"seq": 5}),
    "a gap": ([told(1)], {"seq": 7}),
    "number 0": ([told(1)], {"seq": 0}),
    "another model": ([told(1)], {"model": "n"}),
    "a rank that never spoke": ([told(1)], {"dp_rank": 1}),
    "another block size": ([told(0, size=8)], {}),
    "a tier that nobody spoke of": ([told(1, medium="CPU")], {}),
    "an adapter that nobody spoke of": ([told(1)], {"lora": "l"}),
    "the same in the event": ([told(1, lora_name="l")], {}),
}


def after_one(make: MakeBench) -> Bench:
    bench = make(orphan_blocks_max=8)
    bench.post(stored(0), seq=5)
    return bench


@pytest.mark.parametrize("name", SEQUELS)
def test_a_batch_that_was_read_natively_does_what_its_events_do(make: MakeBench, name: str) -> None:
    events, more = SEQUELS[name]
    natively, usually = after_one(make), after_one(make)
    payload = msgspec.msgpack.encode([None, events])
    said = {"pod": "a", "model": "m", **more}
    decoded = msgspec.structs.replace(decode_batch(payload, block_size=SIZE), ts=said.pop("ts", None))
    result = usually.service.post(Envelope(**said), decoded)
    assert posted_natively(natively, *events, **more) == result
    assert natively.service.stats() == usually.service.stats()
    assert natively.match() == usually.match()
    sources = [bench.service.pod("a").sources for bench in (natively, usually)]
    assert sources[0] == sources[1]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_the_usual_next_batch_changes_nothing_natively(make: MakeBench, name: str) -> None:
    events, more = REFUSED[name]
    bench, other = after_one(make), after_one(make)
    assert posted_natively(bench, *events, **more) is None
    assert bench.service.stats() == other.service.stats()


def test_tiers_and_adapters_that_were_spoken_of_are_usual(make: MakeBench) -> None:
    natively, usually = after_one(make), after_one(make)
    for bench in (natively, usually):
        bench.post(stored(0, tier=Tier.CPU, size=8, name=900), stored(0, lora="l"))
    for more, event in (
        ({}, told(0, size=8, medium="CPU")),
        ({}, told(1, lora_name="l")),
        ({"lora": "l"}, told(1)),
        ({}, told_removed(100, medium="CPU")),
    ):
        decoded = decode_batch(msgspec.msgpack.encode([None, [event]]), block_size=SIZE)
        result = usually.service.post(Envelope(pod="a", model="m", lora=more.get("lora")), decoded)
        assert posted_natively(natively, event, **more) == result
        assert natively.service.stats() == usually.service.stats()
    # An unfinished chunk is ignored, and a larger one tells the tier's size anew: that takes `post`.
    assert posted_natively(natively, told(0, size=4, medium="CPU")) is None
    assert posted_natively(natively, told(0, size=16, medium="CPU")) is None


def test_a_source_that_was_silent_is_not_fed_natively(make: MakeBench) -> None:
    bench = after_one(make)
    bench.clock.seconds += 61
    bench.service.tick()
    assert posted_natively(bench, told(1)) is None
    assert posted_natively(bench, told_removed(100)) is None


def test_nothing_is_fed_natively_while_there_are_hints(make: MakeBench) -> None:
    bench = make()
    bench.post(stored(0, metadata=b'{"anchor":1}'))
    assert not bench.service.hints.is_empty
    assert posted_natively(bench, told(1)) is None


def test_the_live_feed_is_told_of_batches_that_were_read_natively(make: MakeBench) -> None:
    bench = after_one(make)
    feed = bench.service.live.subscribe()
    assert posted_natively(bench, told(1), seq=6) is not None
    feed.end()

    async def heard() -> bytes:
        return b"".join([chunk async for chunk in feed.chunks(60)])

    assert b'"pod":"a","dp_rank":0,"seq":6,"accepted":1,"stored_blocks":1' in asyncio.run(heard())
