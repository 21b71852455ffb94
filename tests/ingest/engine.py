"""The truth that ingest must find: an engine's stream of one source, as plain lists, and what its sockets
would say.
"""

from __future__ import annotations

import dataclasses

from app.ingest.actions import Action, Deliver, Report, RequestReplay, Reset, StopReplay
from app.ingest.sequence import SequenceCounters, SequenceLimits, SequenceTracker
from app.ingest.window import HoldBudget
from app.pods import SourceState

LIMITS = SequenceLimits(held_batches_max=4, digests=8)


@dataclasses.dataclass
class SimulatedEngine:
    """Numbers batches from 0 in each incarnation and remembers the last `buffer_batches` for replays."""

    buffer_batches: int = 1_000
    incarnation: int = 0
    batches: list[bytes] = dataclasses.field(default_factory=list)

    def publish(self) -> tuple[int, bytes]:
        seq = len(self.batches)
        self.batches.append(f"{self.incarnation}:{seq}".encode())
        return seq, self.batches[seq]

    def restart(self) -> None:
        self.incarnation += 1
        self.batches = []

    def replay(self, start_seq: int) -> list[tuple[int, bytes]]:
        oldest = max(start_seq, len(self.batches) - self.buffer_batches)
        return [(seq, self.batches[seq]) for seq in range(oldest, len(self.batches))]


class Bench:
    """A tracker with an engine and a clock at hand; keeps what the tracker decided."""

    def __init__(
        self,
        engine: SimulatedEngine | None = None,
        *,
        limits: SequenceLimits = LIMITS,
        replay_endpoint: bool = True,
        held_bytes_max: int = 1_000_000,
    ) -> None:
        self.engine = engine or SimulatedEngine()
        self.now = 0.0
        self.budget = HoldBudget(held_bytes_max)
        self.counters = SequenceCounters()
        self.tracker = SequenceTracker(
            limits, self.budget, self.counters, replay_endpoint=replay_endpoint, now=0.0
        )
        self.delivered: list[bytes] = []
        self.resets: list[Reset] = []
        self.reports: list[Report] = []
        self.lost = False  # since the last reset
        self.state = SourceState.DOWN
        self.request: int | None = None  # what the last unanswered replay request asks for
        self.requests: list[int] = []

    @property
    def gaps(self) -> int:
        return sum(report.gaps for report in self.reports)

    @property
    def replays(self) -> int:
        return sum(report.replays for report in self.reports)

    def is_trusted(self) -> bool:
        return self.state is SourceState.LIVE and not self.lost

    def run(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Deliver):
                assert action.seq == int(action.payload.split(b":")[1]), "a payload under another's number"
                self.delivered.append(action.payload)
            elif isinstance(action, Reset):
                assert self.state is not SourceState.LIVE, "an emptied picture passes for a whole one"
                self.delivered = []
                self.lost = False
                self.resets.append(action)
            elif isinstance(action, Report):
                self.reports.append(action)
                if action.state is SourceState.DEGRADED:
                    self.lost = True
                else:
                    self.state = action.state
            elif isinstance(action, RequestReplay):
                self.request = action.start_seq
                self.requests.append(action.start_seq)
                self.tracker.on_replay_sent(self.now)
            elif isinstance(action, StopReplay):
                self.request = None

    def connect(self) -> None:
        self.run(self.tracker.on_connected(self.now))

    def disconnect(self) -> None:
        self.run(self.tracker.on_disconnected(self.now, "gone"))

    def live(self, seq: int, payload: bytes) -> None:
        self.run(self.tracker.on_live(seq, payload, self.now))

    def publish(self, count: int = 1, *, lost: bool = False) -> None:
        for _ in range(count):
            frame = self.engine.publish()
            if not lost:
                self.live(*frame)

    def answer(self, *, replies_max: int | None = None, end: bool = True) -> None:
        """Serve the outstanding replay request; `replies_max` and `end=False` cut it short."""
        assert self.request is not None, "no replay was asked for"
        self.serve(self.engine.replay(self.request)[:replies_max], end=end)

    def serve(self, replies: list[tuple[int, bytes]], *, end: bool = True) -> None:
        for seq, payload in replies:
            requests = len(self.requests)
            self.run(self.tracker.on_replay(seq, payload, self.now))
            if self.request is None or len(self.requests) != requests:
                return  # the socket of this replay is closed
        if end:
            self.request = None
            self.run(self.tracker.on_replay_end(self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.run(self.tracker.tick(self.now))

    def settle(self, rounds: int = 60) -> None:
        """Let a healthy replay socket answer everything that is asked, and time pass."""
        for _ in range(rounds):
            while self.request is not None:
                self.answer()
            self.wait(0.5)
