"""The feed between the receiver and a writer that has no room now and then."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading

import pytest

from app.ingest.actions import Deliver, Report
from app.ingest.feed import Feed, QueueLimits, Stream
from app.ingest.receiver import Receiver
from app.ingest.turns import Turns
from app.ingest.vllm import decode_batch
from app.ingest.zmq import ZmqIngest
from app.pods import PodSpec, SourceState
from tests.ingest.publisher import Publisher, payload_of
from tests.ingest.test_zmq import SETTINGS, Ledger, Scene, spec

BATCHES_MAX = 8


@dataclasses.dataclass
class Gate:
    """As many batches as the writer has room for, then it is blocked."""

    ledger: Ledger
    room: int

    def is_blocked(self) -> bool:
        return len(self.ledger.entry().seqs) >= self.room


class Bench:
    """A feed on the running loop."""

    def __init__(self, room: int) -> None:
        self.ledger = Ledger()
        self.gate = Gate(self.ledger, room)
        self.resumed = 0
        self.stream = Stream("pod", 0, "tcp://127.0.0.1:1", None)
        self.feed = Feed(
            self.ledger,
            decode_batch,
            QueueLimits(queue_batches_max=BATCHES_MAX),
            Turns(asyncio.get_running_loop(), slice_s=0.00015),
            self._resume,
            is_blocked=self.gate.is_blocked,
        )

    def _resume(self) -> None:
        self.resumed += 1

    def put(self, *seqs: int) -> None:
        for seq in seqs:
            self.feed.put(self.stream, Deliver(seq, payload_of(seq), digest=seq))

    async def rest(self) -> None:
        """Until the loop has nothing of the feed's left to do: it goes in single rounds."""
        for _ in range(10 * BATCHES_MAX):
            await asyncio.sleep(0)

    @property
    def applied(self) -> list[int]:
        return self.ledger.entry().seqs


def test_what_a_blocked_writer_has_no_room_for_waits_in_order() -> None:
    async def play() -> None:
        bench = Bench(room=2)
        bench.put(0, 1, 2)
        bench.feed.put(bench.stream, Report(SourceState.LIVE, cause="behind them"))
        bench.put(3)
        bench.feed.flush()
        await bench.rest()
        assert bench.applied == [0, 1], "blocked in the middle of a drain"
        assert bench.ledger.entry().states == [], "nothing overtakes"
        assert bench.feed.queued_batches == 3
        assert bench.feed.queued_bytes == len(payload_of(2)) + len(payload_of(3))
        slices = bench.feed.counters.drain_slices
        await bench.rest()
        assert bench.feed.counters.drain_slices == slices, "it does not ask again and again"
        bench.gate.room = 100
        bench.feed.flush()
        await bench.rest()
        assert bench.applied == [0, 1, 2, 3]
        assert bench.ledger.entry().states == [SourceState.LIVE]
        assert (bench.feed.queued_batches, bench.feed.queued_bytes) == (0, 0)

    asyncio.run(play())


def test_reading_stops_at_the_bound_and_goes_on_when_there_is_room() -> None:
    async def play() -> None:
        bench = Bench(room=0)
        bench.put(*range(BATCHES_MAX))
        bench.feed.flush()
        await bench.rest()
        assert bench.applied == []
        assert bench.feed.is_full(), "the receiver stops reading, and the publisher's own queue fills"
        assert (bench.feed.pauses, bench.resumed) == (1, 0)
        bench.gate.room = BATCHES_MAX // 2
        bench.feed.flush()
        await bench.rest()
        assert (len(bench.applied), bench.resumed) == (BATCHES_MAX // 2, 0), "half of it must be free"
        bench.gate.room += 1
        bench.feed.flush()
        await bench.rest()
        assert bench.resumed == 1
        assert not bench.feed.is_full()

    asyncio.run(play())


def test_what_is_queued_at_the_end_is_not_applied() -> None:
    async def play() -> None:
        bench = Bench(room=100)
        bench.put(0, 1)
        bench.feed.flush()
        bench.feed.close()
        await bench.rest()
        assert bench.applied == []
        assert (bench.feed.queued_batches, bench.feed.queued_bytes) == (0, 0)

    asyncio.run(play())


def test_a_report_that_fails_does_not_keep_the_others_waiting() -> None:
    async def play() -> None:
        bench = Bench(room=100)
        bench.put(*range(BATCHES_MAX // 2))
        bench.ledger.refused_pods.add("pod")
        bench.ledger.set_source_state = fail  # type: ignore[method-assign]
        assert bench.feed.queued_batches == BATCHES_MAX // 2
        loop = asyncio.get_running_loop()
        failures: list[object] = []
        loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
        bench.feed.flush()
        await bench.rest()
        assert bench.feed.queued_batches == 0
        assert len(failures) == BATCHES_MAX // 2

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("made by the test")

    asyncio.run(play())


def test_monitors_are_read_while_the_feed_is_full() -> None:
    """A monitor that is not read holds ZMQ's thread up behind some 2,000 events, and with it all other sources. Closing
    its socket would then never return."""
    connections = 0
    listener = socket.create_server(("127.0.0.1", 0))

    def accept_and_close() -> None:
        nonlocal connections
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()
                connections += 1

    accepting = threading.Thread(target=accept_and_close)
    accepting.start()

    async def play() -> None:
        publisher = Publisher()
        try:
            publisher.publish(30)
            ledger = Ledger()
            settings = dataclasses.replace(
                SETTINGS,
                queue=QueueLimits(queue_batches_max=4),
                sockets=dataclasses.replace(
                    SETTINGS.sockets,
                    reconnect_interval_s=0.001,
                    reconnect_interval_s_max=0.001,
                    handshake_patience_s=0.3,
                ),
            )
            gate = Gate(ledger, room=0)
            ingest = ZmqIngest(ledger, settings, is_blocked=gate.is_blocked)
            at = Scene(ledger, ingest)
            ingest.pod_added(spec(publisher))
            ingest.start()
            try:
                await at.until(lambda: ingest.counters()["queue_full_pauses"] == 1, "the replay fills it")
                port = listener.getsockname()[1]
                ingest.pod_added(PodSpec("closes", "m", zmq_endpoint=f"tcp://127.0.0.1:{port}"))
                await at.until(lambda: connections >= 600, "ZMQ goes on")
                assert ingest.queued_batches < 100, "what is wrong is told once"
                ingest.pod_removed("closes")
                gate.room = 1_000
                ingest.unblocked()
                await at.until_exact(publisher)
            finally:
                ingest.stop()
        finally:
            publisher.kill()

    try:
        asyncio.run(play())
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()


def test_replies_that_wait_for_room_are_not_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0
    go_on = Receiver._go_on

    def counted(self: Receiver, stop_at_s: float) -> bool:
        nonlocal turns
        turns += 1
        return go_on(self, stop_at_s)

    monkeypatch.setattr(Receiver, "_go_on", counted)

    async def play() -> None:
        publisher = Publisher()
        try:
            publisher.publish(30)
            ledger = Ledger()
            gate = Gate(ledger, room=0)
            settings = dataclasses.replace(SETTINGS, queue=QueueLimits(queue_batches_max=4))
            ingest = ZmqIngest(ledger, settings, is_blocked=gate.is_blocked)
            at = Scene(ledger, ingest)
            ingest.pod_added(spec(publisher))
            ingest.start()
            try:
                await at.until(lambda: ingest.counters()["queue_full_pauses"] == 1, "the replay fills it")
                await asyncio.sleep(3 * SETTINGS.sequence.replay_timeout_s)
                assert ingest.counters()["queue_full_pauses"] == 1, "one pause, however long"
                assert turns < 1_000, "it waits for room, and for ticks, and does not ask again and again"
                gate.room = 1_000
                ingest.unblocked()
                await at.until_exact(publisher)
                assert ingest.counters()["replay_timeouts"] == 0
                assert ledger.entry().replays == 1
            finally:
                ingest.stop()
        finally:
            publisher.kill()

    asyncio.run(play())


def test_a_stream_whose_writer_was_blocked_is_exact_afterwards() -> None:
    async def play() -> None:
        publisher = Publisher()
        try:
            ledger = Ledger()
            gate = Gate(ledger, room=0)
            ingest = ZmqIngest(ledger, SETTINGS, is_blocked=gate.is_blocked)
            at = Scene(ledger, ingest)
            ingest.pod_added(spec(publisher))
            ingest.start()
            try:
                publisher.publish(20)
                await at.until(lambda: ingest.queued_batches >= 20, "they wait")
                assert ledger.entry().seqs == []
                for room in (5, 6, 1_000):
                    gate.room = room
                    ingest.unblocked()
                    await at.until(
                        lambda room=room: len(ledger.entry().seqs) == min(room, 20),  # type: ignore[misc]
                        "as many as there is room for",
                    )
                publisher.publish(5)
                await at.until_exact(publisher)
            finally:
                ingest.stop()
        finally:
            publisher.kill()

    asyncio.run(play())
