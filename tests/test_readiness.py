"""What a router waits for before it asks a process, and when it waits no more: on a clock that stands still."""

from __future__ import annotations

from app.config import Settings
from app.index.prefix_index import PrefixIndex
from app.pods import PodSpec, SourceState
from app.readiness import Readiness
from app.service import IndexerService, index_limits

GRACE_S = 30.0
STREAM, REPLAY = "tcp://one:1", "tcp://one:2"
TWO_RANKS = PodSpec("a", "m", zmq_endpoint=STREAM, replay_endpoint=REPLAY, dp_size=2)
WITHOUT_REPLAY = PodSpec("b", "m", zmq_endpoint=STREAM)
POSTING = PodSpec("c", "m")


class Bench:
    def __init__(self, *pods: PodSpec) -> None:
        self.seconds = 1_000.0
        self.unfinished: list[tuple[str, str]] = []
        settings = Settings()
        self.service = IndexerService(settings, PrefixIndex(index_limits(settings)), clock=self.clock)
        for pod in pods:
            self.register(pod)
        self.readiness = Readiness(
            self.service, pods, clock=self.clock, grace_s=GRACE_S, unfinished=lambda: self.unfinished
        )

    def clock(self) -> float:
        return self.seconds

    def register(self, pod: PodSpec) -> None:
        self.service.register(pod)
        if pod.zmq_endpoint is not None:
            for dp_rank in range(pod.dp_size):
                self.say(pod.name, dp_rank, SourceState.DOWN)

    def say(self, pod: str, dp_rank: int, state: SourceState) -> None:
        self.service.set_source_state(pod, dp_rank, state, cause="told")

    @property
    def places(self) -> list[str]:
        return [place for place, _ in self.readiness.missing()]


def begun(*pods: PodSpec) -> Bench:
    bench = Bench(*pods)
    bench.readiness.begin()
    return bench


def test_nothing_is_ready_before_the_process_has_started() -> None:
    bench = Bench()
    bench.seconds += 2 * GRACE_S
    assert bench.readiness.missing() == [("", "the process is starting")]
    bench.readiness.begin()
    assert bench.readiness.missing() == []


def test_each_rank_is_waited_for_until_it_is_caught_up_once() -> None:
    bench = begun(TWO_RANKS, POSTING)
    assert bench.readiness.missing() == [
        ("pods.a.0", "pod 'a' rank 0 is not connected yet"),
        ("pods.a.1", "pod 'a' rank 1 is not connected yet"),
    ]
    bench.say("a", 0, SourceState.CATCHING_UP)
    assert bench.readiness.missing()[0] == ("pods.a.0", "pod 'a' rank 0 is replaying what was missed")
    bench.say("a", 0, SourceState.LIVE)
    assert bench.places == ["pods.a.1"]
    bench.say("a", 0, SourceState.DOWN)
    assert bench.places == ["pods.a.1"], "what fails later is its own state's to say"
    bench.say("a", 1, SourceState.LIVE)
    assert bench.places == []


def test_a_stream_without_a_replay_is_waited_for_until_it_is_connected() -> None:
    """An idle engine sends no batch that could show whether any was missed."""
    bench = begun(WITHOUT_REPLAY)
    assert bench.places == ["pods.b.0"]
    bench.say("b", 0, SourceState.CATCHING_UP)
    assert bench.places == []


def test_a_loss_is_no_reason_to_wait() -> None:
    bench = begun(WITHOUT_REPLAY)
    bench.say("b", 0, SourceState.LIVE)
    bench.say("b", 0, SourceState.DEGRADED)
    assert bench.places == []


def test_a_pod_that_is_gone_is_not_waited_for() -> None:
    bench = begun(TWO_RANKS)
    bench.service.drop_pod("a")
    assert bench.places == []


def test_the_time_of_grace_runs_from_the_start_and_ends_all_waiting() -> None:
    bench = Bench(TWO_RANKS)
    bench.seconds += GRACE_S
    bench.readiness.begin()
    bench.unfinished = [("discovery", "has not looked yet")]
    bench.seconds += GRACE_S - 1
    assert bench.places == ["discovery", "pods.a.0", "pods.a.1"]
    bench.seconds += 1
    assert bench.places == []


def test_once_ready_always_ready() -> None:
    bench = begun(WITHOUT_REPLAY)
    bench.say("b", 0, SourceState.LIVE)
    assert bench.places == []
    bench.say("b", 0, SourceState.DOWN)
    bench.unfinished = [("discovery", "has not looked yet")]
    bench.register(TWO_RANKS)
    bench.readiness.wait_for(TWO_RANKS)
    assert bench.places == []


def test_what_is_discovered_before_that_is_waited_for_too() -> None:
    bench = begun()
    bench.unfinished = [("discovery", "has not looked yet")]
    assert bench.places == ["discovery"]
    for pod in (TWO_RANKS, POSTING):
        bench.register(pod)
        bench.readiness.wait_for(pod)
    bench.unfinished = []
    assert bench.places == ["pods.a.0", "pods.a.1"]
