"""Random histories of one source against the tracker: what it delivered is the engine's truth, or it says
that it is not.

The engine publishes, forgets, restarts (seen or unseen by the connection); the network drops, doubles and
disconnects, and what is under way on the one socket arrives before or behind what is under way on the other;
the replay socket answers, answers in part, drops replies, keeps silent. All the while: what a trusted source
delivered is the beginning of one incarnation, and nothing is forgotten for a restart that was none. After each
history everything is repaired for a while, and then: delivered == published, in order, once. A loss is an
excuse only where the engine had forgotten or the replay socket had been silent.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from app.ingest.sequence import SequenceLimits
from app.pods import SourceState
from tests.ingest.engine import Bench, SimulatedEngine

LIMITS = SequenceLimits(held_batches_max=3, digests=4)
STEPS_S = (0.0, 0.1, LIMITS.retry_delay_s, LIMITS.replay_timeout_s, LIMITS.probe_interval_s)


class TrackedSource(RuleBasedStateMachine):
    make_engine: type[SimulatedEngine] = SimulatedEngine
    make_bench: type[Bench] = Bench
    bench: Bench
    connected: bool
    excused: bool  # the engine forgot, or the replay socket kept silent, at some time
    restarts: int
    in_place: bool  # it restarted over one connection
    blind: bool  # and no number needs to have fallen back
    frames: deque[tuple[int, bytes]]  # live, under way
    replies: deque[tuple[int, bytes] | None]  # to the request of that number, under way; None ends them
    replies_to: int

    @initialize(
        buffer_batches=st.sampled_from([2, 5, 1_000]),
        before=st.integers(0, 4),
        held_bytes_max=st.sampled_from([8, 1_000]),
        endpoint=st.booleans(),
    )
    def begin(self, buffer_batches: int, before: int, held_bytes_max: int, endpoint: bool) -> None:
        self.bench = self.make_bench(
            self.make_engine(buffer_batches),
            limits=LIMITS,
            held_bytes_max=held_bytes_max,
            replay_endpoint=endpoint,
        )
        self.endpoint = endpoint
        self.excused = buffer_batches < 1_000 or not endpoint
        self.connected = self.in_place = self.blind = False
        self.restarts = self.replies_to = 0
        self.frames, self.replies = deque(), deque()
        self.bench.publish(before, lost=True)

    @rule(
        count=st.integers(1, 4),
        fault=st.sampled_from(["none", "none", "lost", "doubled"]),
        lags=st.sampled_from([False, False, True]),
    )
    def publish(self, count: int, fault: str, *, lags: bool = False) -> None:
        for _ in range(count):
            frame = self.bench.engine.publish()
            if self.connected and fault != "lost":
                self.frames.extend([frame] * (2 if fault == "doubled" else 1))
        if not lags:
            self.frames_arrive(len(self.frames))

    @rule(count=st.integers(1, 3))
    def frames_arrive(self, count: int) -> None:
        for _ in range(min(count, len(self.frames))):
            self.bench.live(*self.frames.popleft())

    @rule(hidden=st.sampled_from([False, False, True]))
    def restart_in_place(self, hidden: bool) -> None:
        self.restart()
        self.in_place = True
        self.blind |= hidden
        if self.connected and not hidden:
            self.publish(1, "none", lags=True)

    @rule(restarted=st.booleans())
    def disconnect(self, restarted: bool) -> None:
        if self.connected:
            self.connected = False
            self.bench.disconnect()
        if restarted:
            self.restart()

    @rule()
    def connect(self) -> None:
        self.connected = True
        self.bench.connect()

    @rule(
        how=st.sampled_from(["whole", "whole", "cut", "holes", "without end"]),
        replies=st.integers(0, 3),
        lags=st.sampled_from([False, False, True]),
        overtaken_by=st.sampled_from([0, 0, 1]),
    )
    def answer(self, how: str, replies: int, lags: bool, overtaken_by: int) -> None:
        if self.bench.request is None or not self.connected:
            return
        buffered: list[tuple[int, bytes]] = self.bench.engine.replay(self.bench.request)
        self.replies_to = len(self.bench.requests)
        self.replies = deque(buffered)
        if how == "cut":
            self.replies = deque(buffered[:replies])
        elif how == "holes":
            self.replies = deque(buffered[:1] + buffered[1 + replies :])
        if how in ("whole", "holes"):
            self.replies.append(None)
        if overtaken_by:
            self.publish(overtaken_by, "none")
        if not lags:
            self.replies_arrive(len(self.replies))

    @rule(count=st.integers(1, 3))
    def replies_arrive(self, count: int) -> None:
        """On the socket of their request, as long as it is open."""
        for _ in range(min(count, len(self.replies))):
            reply = self.replies.popleft()
            if self.bench.request is None or len(self.bench.requests) != self.replies_to:
                self.replies.clear()
                return
            self.bench.serve([] if reply is None else [reply], end=reply is None)

    @rule(step_s=st.sampled_from(STEPS_S))
    def wait(self, step_s: float) -> None:
        if self.bench.request is not None and step_s >= LIMITS.replay_timeout_s:
            self.excused = True
        self.bench.wait(step_s)

    @rule(exact=st.booleans())
    def deadline(self, exact: bool) -> None:
        self.excused = True
        self.bench.wait(LIMITS.disconnect_deadline_s - (0.0 if exact else 0.001))

    @invariant()
    def delivered_in_order_and_once(self) -> None:
        seqs = [int(payload.split(b":")[1]) for payload in self.bench.delivered]
        assert seqs == sorted(set(seqs))

    @invariant()
    def trusted_is_the_beginning_of_one_incarnation(self) -> None:
        if self.bench.is_trusted() and self.endpoint and not self.in_place:
            told = [payload.split(b":") for payload in self.bench.delivered]
            assert [int(seq) for _, seq in told] == list(range(len(told)))
            assert len({incarnation for incarnation, _ in told}) <= 1

    @invariant()
    def nothing_is_forgotten_for_a_restart_that_was_none(self) -> None:
        if not self.restarts and self.bench.engine.buffer_batches == 1_000:
            assert not any(reset.restarted for reset in self.bench.resets)

    @invariant()
    def budget_is_kept(self) -> None:
        bench = self.bench
        assert 0 <= bench.budget.used_bytes <= bench.budget.bytes_max
        assert bench.tracker.held_batches <= LIMITS.held_batches_max

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        self.frames_arrive(len(self.frames))
        if not self.connected:
            bench.connect()
        bench.settle()
        if not self.endpoint:
            bench.publish(1)  # without a replay only the next batch can tell
        assert bench.state is SourceState.LIVE
        if not bench.lost and not self.blind:
            self.check_truth()
        else:
            assert self.excused or self.blind, "nothing was lost that a replay could not have brought"
            self.check_restart_heals()
        assert bench.budget.used_bytes == 0

    def restart(self) -> None:
        self.bench.engine.restart()
        self.restarts += 1
        if not self.endpoint:
            # Numbers that go on where the old ones ended cannot be told from those without a replay.
            self.connect()
            self.publish(1, "none")

    def check_restart_heals(self) -> None:
        self.bench.engine.restart()
        self.bench.publish(1)
        self.bench.settle()
        assert not self.bench.lost
        self.check_truth()

    def check_truth(self) -> None:
        assert self.bench.delivered == self.bench.engine.batches


TrackedSource.TestCase.settings = settings(
    max_examples=300, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTrackedSource = TrackedSource.TestCase


# Rule, how often, and what draws its arguments. Hypothesis shrinks what it finds; this plays forty histories in the time
# of one of its, and so finds what takes several rare steps one behind the other.
RULES: list[tuple[str, float, Callable[[random.Random], dict[str, Any]]]] = [
    ("connect", 2, lambda _: {}),
    ("disconnect", 1, lambda draw: {"restarted": draw.random() < 0.5}),
    ("restart_in_place", 0.4, lambda draw: {"hidden": draw.random() < 0.3}),
    ("frames_arrive", 2, lambda draw: {"count": draw.randint(1, 3)}),
    ("replies_arrive", 3, lambda draw: {"count": draw.randint(1, 3)}),
    ("wait", 6, lambda draw: {"step_s": draw.choice(STEPS_S)}),
    ("deadline", 0.2, lambda draw: {"exact": draw.random() < 0.5}),
    (
        "publish",
        6,
        lambda draw: {
            "count": draw.randint(1, 4),
            "fault": draw.choice(["none", "none", "lost", "doubled"]),
            "lags": draw.random() < 0.3,
        },
    ),
    (
        "answer",
        6,
        lambda draw: {
            "how": draw.choice(["whole", "whole", "cut", "holes", "without end"]),
            "replies": draw.randint(0, 3),
            "lags": draw.random() < 0.3,
            "overtaken_by": draw.choice([0, 0, 1]),
        },
    ),
]


def play(seed: int, kind: type[TrackedSource] = TrackedSource) -> None:
    draw = random.Random(seed)
    source = kind()
    source.begin(
        buffer_batches=draw.choice([2, 5, 1_000]),
        before=draw.randint(0, 4),
        held_bytes_max=draw.choice([8, 1_000]),
        endpoint=draw.random() < 0.8,
    )
    for _ in range(draw.choice([8, 25, 40])):
        ((name, _, arguments),) = draw.choices(RULES, [weight for _, weight, _ in RULES])
        getattr(source, name)(**arguments(draw))
        source.delivered_in_order_and_once()
        source.trusted_is_the_beginning_of_one_incarnation()
        source.nothing_is_forgotten_for_a_restart_that_was_none()
        source.budget_is_kept()
    source.teardown()


def test_seeded_histories() -> None:
    for seed in range(4_000):
        try:
            play(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
