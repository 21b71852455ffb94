"""Turns on the loop: who comes when, and what others have between."""

from __future__ import annotations

import asyncio
import time

import pytest

from app.ingest.turns import Turns
from app.observability.correlation import CURRENT, Correlation


async def rounds(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_works_alternate_and_the_loop_has_a_round_between() -> None:
    async def play() -> None:
        log: list[str] = []
        turns = Turns(asyncio.get_running_loop(), slice_s=0.0)
        left = {"reading": 3, "draining": 2}

        def work(name: str, stop_at_s: float) -> bool:
            assert stop_at_s <= time.perf_counter(), "a slice of no time is over at once"
            log.append(name)
            left[name] -= 1
            return left[name] > 0

        def reading(stop_at_s: float) -> bool:
            return work("reading", stop_at_s)

        def draining(stop_at_s: float) -> bool:
            return work("draining", stop_at_s)

        for _ in range(2):
            turns.ask(reading)
            turns.ask(draining)
        for _ in range(12):
            await rounds(1)
            log.append("-")
        text = "".join(entry[0] for entry in log)
        assert text.replace("-", "") == "rdrdr", "as often as there is more, however often they asked"
        assert "rd" not in text, "a round of the loop lies between"
        assert "dr" not in text

    asyncio.run(play())


def test_who_asks_within_its_own_turn_has_one_more() -> None:
    async def play() -> None:
        turns = Turns(asyncio.get_running_loop(), slice_s=1.0)
        done = 0

        def work(stop_at_s: float) -> bool:
            nonlocal done
            done += 1
            if done == 1:
                turns.ask(work)
            return done == 1

        turns.ask(work)
        await rounds(20)
        assert done == 2

    asyncio.run(play())


def test_a_work_that_fails_takes_no_turn_from_another(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        turns = Turns(asyncio.get_running_loop(), slice_s=1.0)
        done = 0

        def failing(stop_at_s: float) -> bool:
            raise RuntimeError("made by the test")

        def sound(stop_at_s: float) -> bool:
            nonlocal done
            done += 1
            return False

        turns.ask(failing)
        turns.ask(sound)
        await rounds(20)
        assert done == 1
        turns.ask(sound)
        await rounds(20)
        assert done == 2

    asyncio.run(play())
    assert "made by the test" in caplog.text


def test_a_turn_is_no_part_of_the_request_that_asked_for_it() -> None:
    async def play() -> None:
        turns = Turns(asyncio.get_running_loop(), slice_s=1.0)
        requests: list[Correlation | None] = []

        def work(_stop_at_s: float) -> bool:
            requests.append(CURRENT.get())
            return len(requests) == 1

        CURRENT.set(Correlation("a-put"))
        turns.ask(work)
        await rounds(10)
        assert requests == [None, None]

    asyncio.run(play())
