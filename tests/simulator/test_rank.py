"""A rank's stream: order, faults on the way out, and what a restart leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from app.errors import Overloaded, Unresponsive
from app.ingest.vllm import WireForm
from app.simulator.engine import Output, Prompt
from app.simulator.engine_settings import EngineSettings
from app.simulator.kv_cache import KVCacheSettings
from app.simulator.rank import Rank

Test = Callable[[Rank, "Sent"], Awaitable[None]]


class Sent:
    """A sink that remembers what it was given, and has no room as often as it is told."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []
        self.restarts = 0
        self.refuse_next = 0

    def publish(self, seq: int, payload: bytes, *, copies: int = 1) -> None:
        if self.refuse_next:
            self.refuse_next -= 1
            raise Overloaded("no room")
        assert msgspec.msgpack.decode(payload)[1], "an empty batch is never published"
        self.batches.append((seq, copies))

    def restart(self) -> None:
        self.restarts += 1

    def stop(self) -> None:
        pass


def with_rank(test: Test, *, speed: float = float("inf")) -> None:
    async def run() -> None:
        sent = Sent()
        engine = EngineSettings(cache=KVCacheSettings(capacity_pages=50, block_size=4))
        rank = Rank(0, engine, sent, form=WireForm.MAPS_0_33, speed=speed)
        rank.start()
        await test(rank, sent)
        await rank.stop()

    asyncio.run(run())


async def ask(rank: Rank, first: int = 0, **more: Any) -> list[Output]:
    prompt = Prompt(range(first, first + 9), **{"max_tokens": 1, **more})
    return [output async for output in rank.generate(prompt)]


async def finish(outputs: AsyncIterator[Output]) -> None:
    async for _ in outputs:
        pass


def test_events_are_out_before_the_answer_is() -> None:
    async def test(rank: Rank, sent: Sent) -> None:
        for number in range(3):
            await ask(rank, 100 * number)
            assert sent.batches == [(seq, 1) for seq in range(number + 1)]
        await ask(rank, 0)
        assert rank.next_seq == 3, "nothing new was stored, so nothing is said"

    with_rank(test)


def test_dropped_and_duplicated_batches_are_counted_down() -> None:
    async def test(rank: Rank, sent: Sent) -> None:
        rank.faults.drop_next, rank.faults.duplicate_next = 1, 1
        for number in range(3):
            await ask(rank, 100 * number)
        assert sent.batches == [(0, 0), (1, 2), (2, 1)]
        assert (rank.faults.drop_next, rank.faults.duplicate_next) == (0, 0)

    with_rank(test)


def test_lag_delays_events_behind_answers_and_keeps_their_order() -> None:
    async def test(rank: Rank, sent: Sent) -> None:
        rank.faults.lag_s = 0.2
        await ask(rank, 0)
        await ask(rank, 100)
        assert (sent.batches, rank.next_seq) == ([], 2)
        rank.faults.lag_s = 0.0
        await ask(rank, 200)
        assert sent.batches == [(0, 1), (1, 1), (2, 1)]

    with_rank(test)


def test_sink_without_room_is_tried_again() -> None:
    async def test(rank: Rank, sent: Sent) -> None:
        sent.refuse_next = 3
        await ask(rank)
        assert (sent.batches, sent.refuse_next) == ([(0, 1)], 0)

    with_rank(test)


def test_restart_in_place_loses_what_was_not_sent_and_begins_at_0() -> None:
    async def test(rank: Rank, sent: Sent) -> None:
        await ask(rank, 0)
        rank.faults.lag_s = 0.2
        await ask(rank, 100)
        rank.restart_in_place()
        rank.faults.lag_s = 0.0
        (output,) = await ask(rank, 0)
        await rank.drained()
        assert output.cached_tokens == 0
        assert sent.batches == [(0, 1), (0, 1)]
        assert sent.restarts == 1

    with_rank(test)


def test_open_requests_fail_with_the_engine() -> None:
    async def test(rank: Rank, _: Sent) -> None:
        for end in (rank.restart_in_place, rank.stop):
            outputs = rank.generate(Prompt(range(9), max_tokens=100))
            await anext(outputs)
            ended = end()
            if ended is not None:
                await ended
            with pytest.raises(Unresponsive, match="died"):
                await finish(outputs)

    with_rank(test, speed=10.0)


def test_requests_run_together() -> None:
    async def test(rank: Rank, _: Sent) -> None:
        together = await asyncio.gather(*(ask(rank, 0, max_tokens=5) for _ in range(6)))
        texts = {tuple(token for output in outputs for token in output.token_ids) for outputs in together}
        assert len(texts) == 1
        assert [outputs[0].cached_tokens for outputs in together] == [0] + [8] * 5
        assert rank.engine.stats().finished == 6

    with_rank(test)
