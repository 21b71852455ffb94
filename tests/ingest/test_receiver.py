"""The receiver's housekeeping: what it leaves behind when it starts over, lets a source go, or is woken early."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from app.endpoints import Endpoint
from app.ingest.actions import Action, Deliver
from app.ingest.feed import Feed, QueueLimits, Stream
from app.ingest.receiver import Receiver
from app.ingest.sequence import SequenceLimits
from app.ingest.sockets import SocketLimits
from app.ingest.subscription import FollowedPod
from app.ingest.turns import Turns
from app.ingest.vllm import decode_batch
from app.ingest.zmq import ZmqIngest
from app.pods import PodSpec
from tests.ingest.publisher import Publisher
from tests.ingest.test_zmq import SEQUENCE, SETTINGS, SOCKETS, Ledger, Scene, publishers, scene, spec

__all__ = ["publishers"]  # the fixture

_ZMQ_GIVES_UP_S = 30.0  # a handshake, by itself
RESTLESS = dataclasses.replace(SOCKETS, tick_interval_s=0.001)
INQUISITIVE = dataclasses.replace(
    SEQUENCE, settle_s=0.0, probe_interval_s=0.0
)  # asks for a replay at each tick
PATIENT = dataclasses.replace(SEQUENCE, settle_s=60.0, probe_interval_s=60.0)


class FailingFeed(Feed):
    """Fails once when it is told to: in the middle of a source's stream, or in the middle of a turn."""

    fails_at_batch = False
    turns_to_failure = 0
    _is_draining = False

    def put(self, stream: Stream, action: Action) -> None:
        if self.fails_at_batch and stream.pod == "failing" and isinstance(action, Deliver):
            self.fails_at_batch = False
            raise RuntimeError("made by the test")
        super().put(stream, action)

    def flush(self) -> None:
        """At the end of each turn of the receiver; what the feed itself has left over is no turn."""
        self.turns_to_failure -= not self._is_draining
        if self.turns_to_failure == 0 and not self._is_draining:
            raise RuntimeError("made by the test")
        super().flush()

    def _drain(self, stop_at_s: float) -> bool:
        self._is_draining = True
        try:
            return super()._drain(stop_at_s)
        finally:
            self._is_draining = False


class Bench:
    """A receiver on the running loop that does one thing in a turn."""

    def __init__(self, sequence: SequenceLimits, sockets: SocketLimits) -> None:
        self.ledger = Ledger()
        turns = Turns(asyncio.get_running_loop(), slice_s=0.0)
        self.feed = FailingFeed(self.ledger, decode_batch, QueueLimits(), turns, lambda: self.receiver.wake())
        self.receiver = Receiver(self.feed, turns, sequence, sockets)
        self.at = Scene(self.ledger, ZmqIngest(self.ledger))
        self.receiver.start()

    def follow(self, publisher: Publisher, name: str) -> None:
        live = Endpoint("127.0.0.1", publisher.port)
        replay = Endpoint("127.0.0.1", publisher.replay_port)
        stream = Stream(name, 0, str(live), str(replay))
        self.receiver.follow(FollowedPod(name, b"", ((stream, live, replay),)))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("amid", ["opening", "ticking", "closing"])
def test_a_start_over_forgets_what_was_under_way(
    publishers: Callable[..., Publisher], caplog: pytest.LogCaptureFixture, amid: str
) -> None:
    """Each source is followed once afterwards, and no socket of before is touched again."""
    publisher = publishers()
    publisher.publish(3)
    names = [f"pod-{number}" for number in range(12)]

    async def run() -> None:
        bench = Bench(INQUISITIVE, RESTLESS)
        at, receiver = bench.at, bench.receiver
        staying = names
        try:
            for name in names:
                bench.follow(publisher, name)
            if amid != "opening":
                for name in names:
                    await at.until_exact(publisher, pod=name)
            if amid == "closing":
                staying = names[:3]
                for name in names[3:]:
                    receiver.unfollow(name)
            bench.feed.turns_to_failure = len(names) // 3
            await at.until(lambda: receiver.counters.faults == 1, "it has failed")
            publisher.publish(3)
            for name in staying:
                await at.until_exact(publisher, pod=name)
            publisher.publish(3)
            for name in staying:
                await at.until_exact(publisher, pod=name)
            assert receiver.counters.faults == 1
            assert bench.feed.counters.batches_refused == 0, "nobody else tells of the same source"
        finally:
            receiver.stop()

    with caplog.at_level("ERROR"):
        asyncio.run(run())
    assert "made by the test" in caplog.text


def test_a_source_that_failed_has_nothing_open_until_it_is_tried_again(
    publishers: Callable[..., Publisher], caplog: pytest.LogCaptureFixture
) -> None:
    failing, other = publishers(), publishers()
    failing.publish(3)
    other.publish(3)

    async def run() -> None:
        bench = Bench(PATIENT, dataclasses.replace(SOCKETS, reopen_interval_s=3_600.0))
        try:
            bench.follow(other, "other")
            await bench.at.until_exact(other, "other")
            before = descriptors()
            bench.feed.fails_at_batch = True
            bench.follow(failing, "failing")
            await bench.at.until(lambda: bench.receiver.counters.faults == 1, "it has failed")
            await bench.at.until(lambda: descriptors() <= before, "its connections are closed")
        finally:
            bench.receiver.stop()

    with caplog.at_level("ERROR"):
        asyncio.run(run())


def test_who_never_ends_a_handshake_is_left_at_once() -> None:
    """And not first when it is tried again: until then it would have a connection that nobody wants."""

    async def run() -> None:
        limits = dataclasses.replace(SOCKETS, handshake_patience_s=0.1, reopen_interval_s=3_600.0)
        with (
            scene(dataclasses.replace(SETTINGS, sockets=limits)) as at,
            socket.create_server(("127.0.0.1", 0)) as silent,
        ):
            silent.settimeout(_ZMQ_GIVES_UP_S / 2)
            port = silent.getsockname()[1]
            at.ingest.pod_added(PodSpec("pod", "m", zmq_endpoint=f"tcp://127.0.0.1:{port}"))
            connection, _ = await asyncio.to_thread(silent.accept)
            with connection:
                connection.settimeout(_ZMQ_GIVES_UP_S / 2)
                while await asyncio.to_thread(connection.recv, 65_536):
                    pass

    asyncio.run(run())


def test_a_pod_that_goes_amid_the_ticks_is_not_opened_again() -> None:
    """Its address is somebody else's, and is tried at each tick; once it is free, nobody takes it for a pod that went."""

    async def run() -> None:
        limits = dataclasses.replace(RESTLESS, reopen_interval_s=0.0)
        settings = dataclasses.replace(SETTINGS, sockets=limits, slice_s=0.0)
        names = [f"pod-{number}" for number in range(8)]
        with scene(settings) as at, socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            taken = first
            tried = 0

            def is_each_tried() -> bool:
                return at.ingest.counters()["open_failures"] > tried + 30

            for _ in range(20):
                tried = at.ingest.counters()["open_failures"]
                for name in names:
                    at.ingest.pod_added(PodSpec(name, "m", zmq_endpoint=f"tcp://*:{port}"))
                await at.until(is_each_tried, "each is tried")
                for name in names:
                    at.ingest.pod_removed(name)
                taken.close()
                for _ in range(20 * len(names)):
                    await asyncio.sleep(0)
                taken = socket.create_server(("127.0.0.1", port))
            taken.close()

    asyncio.run(run())


class Alarms(asyncio.SelectorEventLoop):
    """Knows the timers that were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._timers: list[asyncio.TimerHandle] = []

    def call_later(  # type: ignore[override]
        self, delay: float, *arguments: Any, **named: Any
    ) -> asyncio.TimerHandle:
        self._timers.append(super().call_later(delay, *arguments, **named))
        return self._timers[-1]

    def waiting(self) -> int:
        return sum(not timer.cancelled() and timer.when() > self.time() for timer in self._timers)


def test_a_message_leaves_no_alarm_behind(publishers: Callable[..., Publisher]) -> None:
    """Who is woken by one has no use for the alarm that was to wake it later: kept, they would be one more for each
    message, and each of them would ring for ever."""
    publisher = publishers()
    settings = dataclasses.replace(
        SETTINGS, sequence=PATIENT, sockets=dataclasses.replace(SOCKETS, tick_interval_s=3_600.0)
    )

    async def run() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Alarms)
        with scene(settings) as at:
            at.ingest.pod_added(spec(publisher))
            await at.until_exact(publisher)
            for _ in range(20):
                publisher.publish()
                await at.until_exact(publisher)
                await asyncio.sleep(2 * SOCKETS.gather_s)
            assert loop.waiting() <= 1

    with asyncio.Runner(loop_factory=Alarms) as runner:
        runner.run(run())
