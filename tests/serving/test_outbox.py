"""Answers that go out together: how many wait for each other, and for how long, by a clock that is set by hand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from app.serving import short_connections
from app.serving.short_connections import ANSWERS_MAX, Outbox

MATCH_S, EVENT_S = 0.0005, 0.002


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self, written: list[bytes]) -> None:
        super().__init__()
        self._written = written
        self.closing = False

    def is_closing(self) -> bool:
        return self.closing

    def writelines(self, pieces: Iterable[bytes]) -> None:  # type: ignore[override]
        self._written.append(b"".join(pieces))


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(short_connections, "time", SimpleNamespace(perf_counter=lambda: self.now_s))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def answers(*ages_s: tuple[float, float], clock: Clock) -> list[int]:
    """How many had gone out behind each (time that passed before it, patience)."""

    async def put() -> list[int]:
        written: list[bytes] = []
        outbox, seen = Outbox(), []
        for number, (passed_s, patience_s) in enumerate(ages_s):
            clock.now_s += passed_s
            outbox.put(Wire(written), (b"%d" % number, b"!"), patience_s)
            seen.append(len(written))
        await asyncio.sleep(0)
        assert written == [b"%d!" % number for number in range(len(ages_s))], (
            "all, in order, behind the round"
        )
        return seen

    return asyncio.run(put())


def test_answers_of_a_round_go_out_behind_it(clock: Clock) -> None:
    assert answers(*[(0.0, MATCH_S)] * 5, clock=clock) == [0] * 5


def test_no_more_wait_than_the_bound(clock: Clock) -> None:
    seen = answers(*[(0.0, EVENT_S)] * (ANSWERS_MAX + 3), clock=clock)
    assert seen == [0] * (ANSWERS_MAX - 1) + [ANSWERS_MAX] * 4


def test_an_answer_waits_no_longer_than_its_patience(clock: Clock) -> None:
    step_s = MATCH_S * 1.2
    assert answers(*[(step_s, EVENT_S)] * 7, clock=clock) == [0, 0, 0, 0, 5, 5, 5]
    assert answers(*[(step_s, MATCH_S)] * 4, clock=clock) == [0, 2, 2, 4]


@pytest.mark.parametrize("places", list(itertools.permutations((MATCH_S, EVENT_S, EVENT_S))))
def test_the_least_patient_one_counts(clock: Clock, places: tuple[float, ...]) -> None:
    late = [(0.0, patience_s) for patience_s in places]
    assert answers(*late, (MATCH_S * 1.5, EVENT_S), clock=clock) == [0, 0, 0, 4]
    assert answers(*[(0.0, EVENT_S)] * 3, (MATCH_S * 1.5, EVENT_S), clock=clock) == [0, 0, 0, 0]


def test_the_last_answer_of_a_connection_says_so(clock: Clock) -> None:
    async def check() -> None:
        written: list[bytes] = []
        outbox, last, other = Outbox(), Wire(written), Wire(written)
        for wire in (last, other):
            outbox.put(wire, (b"HTTP/1.1 200 OK\r\na: b\r\n\r\n", b"{}"), MATCH_S)
        outbox.say_last(last)
        outbox.flush()
        assert written == [
            b"HTTP/1.1 200 OK\r\na: b\r\nconnection: close\r\n\r\n{}",
            b"HTTP/1.1 200 OK\r\na: b\r\n\r\n{}",
        ]
        await asyncio.sleep(0)

    asyncio.run(check())


def test_nothing_is_written_to_who_has_gone(clock: Clock) -> None:
    async def check() -> None:
        written: list[bytes] = []
        outbox, wire = Outbox(), Wire(written)
        outbox.put(wire, (b"a", b"b"), MATCH_S)
        wire.closing = True
        await asyncio.sleep(0)
        assert written == []

    asyncio.run(check())
