"""Two ingests with one picture, as replicas have it: the pod's stream goes from one to the other, and every batch is
applied once, in order."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable

import pytest

from app.config import Settings
from app.events import EventBatch
from app.index.prefix_index import PrefixIndex
from app.ingest.vllm import decode_batch
from app.ingest.zmq import ZmqIngest
from app.pods import PodSpec, Source, SourceState
from app.service import BatchResult, IndexerService, index_limits
from tests.ingest.publisher import Publisher
from tests.ingest.test_zmq import SETTINGS, spec

DEADLINE_S = 30.0


class Recorded(IndexerService):
    """A service that also keeps the numbers of the batches it was given."""

    seqs: list[int]

    def apply(
        self, pod: str, dp_rank: int, batch: EventBatch, *, seq: int | None, digest: int | None = None
    ) -> BatchResult:
        assert seq is not None
        self.seqs.append(seq)
        return super().apply(pod, dp_rank, batch, seq=seq, digest=digest)


class Pair:
    def __init__(self) -> None:
        settings = Settings()
        self.service = Recorded(settings, PrefixIndex(index_limits(settings)), clock=time.monotonic)
        self.service.seqs = []
        self.ingests = [ZmqIngest(self.service, SETTINGS, on_grant=True) for _ in range(2)]
        self.service.listeners.extend(self.ingests)

    @property
    def source(self) -> Source:
        return self.service.pod("pod").sources[0]

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, (self.source, self.service.seqs)
            await asyncio.sleep(0.002)

    async def until_exact(self, publisher: Publisher) -> None:
        newest = len(publisher.batches) - 1 if publisher.batches else None
        await self.until(lambda: (self.source.last_seq, self.source.state) == (newest, SourceState.LIVE))
        assert self.service.stats()["digest"] == alone(publisher), "not as one that saw all from the start"
        assert self.service.stats()["index"]["copies"] == 0, "a block was counted twice"


def alone(publisher: Publisher) -> str:
    """The digest of a service that was fed with the engine's batches."""
    settings = Settings()
    service = IndexerService(settings, PrefixIndex(index_limits(settings)), clock=time.monotonic)
    service.register(PodSpec("pod", "model"))
    for seq, payload in enumerate(publisher.batches):
        service.apply("pod", 0, decode_batch(payload), seq=seq)
    return str(service.stats()["digest"])


def received(ingest: ZmqIngest) -> None:
    """Holds the loop until something waits in the queue that only the loop can empty."""
    deadline_s = time.monotonic() + 1.0
    while not ingest.queued_batches and time.monotonic() < deadline_s:
        time.sleep(0.0002)


@contextlib.asynccontextmanager
async def pair_of() -> AsyncIterator[Pair]:
    pair = Pair()
    for ingest in pair.ingests:
        ingest.start()
    try:
        yield pair
    finally:
        for ingest in pair.ingests:
            ingest.stop()


def test_nothing_is_followed_without_a_grant(publisher: Publisher) -> None:
    publisher.publish(5)

    async def run() -> None:
        async with pair_of() as pair:
            first, second = pair.ingests
            pair.service.register(spec(publisher))
            assert list(first.streams()) == []
            assert pair.source.stream_cause == "", "one that does not follow has nothing to report"
            first.grant("pod")
            first.grant("pod")
            await pair.until_exact(publisher)
            first.withdraw("pod")
            first.withdraw("pod")
            assert list(first.streams()) == []
            publisher.publish(5)
            served = publisher.replays_served
            second.grant("pod")
            await pair.until_exact(publisher)
            assert publisher.replays_served > served
            assert pair.service.seqs == list(range(10)), "the second goes on where the first was"
            assert pair.source.restarts == 0

    asyncio.run(run())


def test_a_grant_may_come_before_its_pod(publisher: Publisher) -> None:
    async def run() -> None:
        async with pair_of() as pair:
            first, _ = pair.ingests
            first.grant("pod")
            publisher.publish(3)
            pair.service.register(spec(publisher))
            await pair.until_exact(publisher)
            pair.service.drop_pod("pod")
            assert list(first.streams()) == []
            pair.service.register(spec(publisher))  # the grant is for the pod, whatever its registration
            await pair.until_exact(publisher)

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(3))
def test_it_moves_to_and_fro_while_the_engine_speaks(publisher: Publisher, seed: int) -> None:
    draw = random.Random(seed)

    async def run() -> None:
        async with pair_of() as pair:
            pair.service.register(spec(publisher))
            holder = 0
            pair.ingests[holder].grant("pod")
            for _ in range(25):
                if draw.random() < 0.5:
                    await pair.until_exact(publisher)
                published = draw.choice([0, 1, 50])
                publisher.publish(published)
                if published and pair.source.state is SourceState.LIVE:
                    received(pair.ingests[holder])
                for _ in range(draw.choice([0, 1, 3, 30])):
                    await asyncio.sleep(0)
                pair.ingests[holder].withdraw("pod")
                publisher.publish(draw.choice([0, 2]))
                holder = draw.randrange(2)
                pair.ingests[holder].grant("pod")
            await pair.until_exact(publisher)
            assert pair.service.seqs == list(range(len(publisher.batches)))
            assert pair.source.gaps == pair.source.restarts == 0

    asyncio.run(run())


def test_an_engine_that_restarted_between_two_holders_is_learned_anew(publisher: Publisher) -> None:
    publisher.publish(5)

    async def run() -> None:
        async with pair_of() as pair:
            first, second = pair.ingests
            pair.service.register(spec(publisher))
            first.grant("pod")
            await pair.until_exact(publisher)
            first.withdraw("pod")
            publisher.restart_in_place()
            publisher.publish(7)
            second.grant("pod")
            await pair.until_exact(publisher)
            assert pair.source.restarts == 1

    asyncio.run(run())
