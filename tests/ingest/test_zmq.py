"""ZmqIngest over real sockets: whatever an engine or the network does, the writer gets the engine's stream
or is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import http.server
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import uvloop
import zmq

from app.endpoints import Endpoint
from app.errors import UnknownPod
from app.events import AllBlocksCleared, EventBatch
from app.hashing import digest
from app.ingest.actions import Action, Deliver, Reset
from app.ingest.feed import Feed, QueueLimits, Stream
from app.ingest.receiver import Receiver
from app.ingest.sequence import SequenceLimits
from app.ingest.sockets import SocketLimits, Sockets
from app.ingest.subscription import FollowedPod
from app.ingest.turns import Turns
from app.ingest.vllm import decode_batch
from app.ingest.zmq import ZmqIngest, ZmqSettings
from app.pods import PodSpec, SourceState
from tests.ingest.publisher import Publisher, payload_of

DEADLINE_S = 30.0
SEQUENCE = SequenceLimits(
    replay_timeout_s=1.0, retry_delay_s=0.05, restart_interval_s=0.05, settle_s=0.1, probe_interval_s=0.3
)
SOCKETS = SocketLimits(
    reconnect_interval_s=0.02, reconnect_interval_s_max=0.1, reopen_interval_s=0.1, tick_interval_s=0.02
)
SETTINGS = ZmqSettings(sequence=SEQUENCE, sockets=SOCKETS)


@dataclasses.dataclass
class Entry:
    """What the writer was told of one source."""

    seqs: list[int] = dataclasses.field(default_factory=list)  # since the last reset
    batches: list[EventBatch] = dataclasses.field(default_factory=list)
    resets: list[bool] = dataclasses.field(default_factory=list)
    states: list[SourceState] = dataclasses.field(default_factory=list)
    stream: SourceState | None = None
    incomplete: bool = False
    causes: list[str] = dataclasses.field(default_factory=list)
    gaps: int = 0
    replays: int = 0


class Ledger:
    """A writer that keeps the ordered log of each source, and refuses what a service would refuse."""

    def __init__(self) -> None:
        self.sources: dict[tuple[str, int], Entry] = {}
        self.refused_pods: set[str] = set()
        self.thread = threading.get_ident()

    def entry(self, pod: str = "pod", dp_rank: int = 0) -> Entry:
        assert threading.get_ident() == self.thread, "the writer is called on the loop's thread"
        return self.sources.setdefault((pod, dp_rank), Entry())

    def position(self, pod: str, dp_rank: int) -> None:
        return None

    def apply(
        self, pod: str, dp_rank: int, batch: EventBatch, *, seq: int | None, digest: int | None = None
    ) -> None:
        if pod in self.refused_pods:
            raise UnknownPod(pod)
        entry = self.entry(pod, dp_rank)
        assert seq is not None
        assert not entry.seqs or seq > entry.seqs[-1], "numbers ascend between two resets"
        entry.seqs.append(seq)
        entry.batches.append(batch)
        if any(isinstance(event, AllBlocksCleared) for event in batch.events):
            entry.incomplete = False

    def reset_source(self, pod: str, dp_rank: int, *, restarted: bool) -> None:
        entry = self.entry(pod, dp_rank)
        assert entry.stream is not SourceState.LIVE, "an emptied picture passes for a whole one"
        entry.seqs, entry.batches = [], []
        entry.resets.append(restarted)
        entry.incomplete = False

    def set_source_state(
        self, pod: str, dp_rank: int, state: SourceState, *, gaps: int = 0, replays: int = 0, cause: str = ""
    ) -> None:
        entry = self.entry(pod, dp_rank)
        entry.states.append(state)
        if state is SourceState.DEGRADED:
            entry.incomplete = True
        else:
            entry.stream = state
        entry.causes.append(cause)
        entry.gaps += gaps
        entry.replays += replays

    def state(self, pod: str = "pod", dp_rank: int = 0) -> SourceState | None:
        """As a service decides: a loss shows until a reset or a clear, where the stream itself is live."""
        entry = self.entry(pod, dp_rank)
        if entry.stream is SourceState.LIVE and entry.incomplete:
            return SourceState.DEGRADED
        return entry.stream

    def is_exact(self, publisher: Publisher, pod: str = "pod", dp_rank: int = 0) -> bool:
        truth = [decode_batch(payload) for payload in publisher.batches]
        return self.entry(pod, dp_rank).batches == truth and self.state(pod, dp_rank) is SourceState.LIVE


@dataclasses.dataclass
class Scene:
    """One ingest on the running loop, with its ledger."""

    ledger: Ledger
    ingest: ZmqIngest

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + DEADLINE_S
        while not condition():
            assert loop.time() < give_up_at_s, f"{what}: {self.ledger.sources}, {self.ingest.counters()}"
            await asyncio.sleep(0.005)

    async def until_exact(self, publisher: Publisher, pod: str = "pod", dp_rank: int = 0) -> None:
        await self.until(lambda: self.ledger.is_exact(publisher, pod, dp_rank), "exact and live")

    async def until_state(self, state: SourceState, pod: str = "pod") -> None:
        await self.until(lambda: self.ledger.state(pod) is state, f"{state}")


@contextmanager
def scene(settings: ZmqSettings = SETTINGS) -> Iterator[Scene]:
    """Inside a running loop."""
    ledger = Ledger()
    ingest = ZmqIngest(ledger, settings)
    ingest.start()
    try:
        yield Scene(ledger, ingest)
        assert ingest.counters()["faults"] == 0
    finally:
        ingest.stop()


def spec(publisher: Publisher, name: str = "pod", **changes: object) -> PodSpec:
    values: dict[str, object] = {
        "zmq_endpoint": f"tcp://127.0.0.1:{publisher.port}",
        "replay_endpoint": f"tcp://127.0.0.1:{publisher.replay_port}",
    }
    return PodSpec(name, "model", **(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def publishers() -> Iterator[Callable[..., Publisher]]:
    made: list[Publisher] = []

    def make(**arguments: object) -> Publisher:
        made.append(Publisher(**arguments))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for publisher in made:
        publisher.kill()


@pytest.mark.parametrize("topic_in_replies", [True, False])
def test_first_contact_and_gap_in_both_reply_forms(
    publishers: Callable[..., Publisher], topic_in_replies: bool
) -> None:
    publisher = publishers(topic_in_replies=topic_in_replies)
    publisher.publish(20)

    async def run() -> None:
        with scene() as at:
            at.ingest.pod_added(spec(publisher))
            assert at.ledger.state() is SourceState.DOWN
            await at.until_exact(publisher)
            entry = at.ledger.entry()
            assert entry.gaps == 0
            assert entry.replays >= 1
            publisher.publish(5)
            await at.until_exact(publisher)
            publisher.faults.drop_live = True
            publisher.publish(3)
            publisher.faults.drop_live = False
            publisher.publish(2)
            await at.until_exact(publisher)
            assert entry.gaps >= 1
            assert SourceState.CATCHING_UP in entry.states
            assert SourceState.DEGRADED not in entry.states
            assert entry.resets == []

    asyncio.run(run())


def test_every_frame_twice(publishers: Callable[..., Publisher]) -> None:
    publisher = publishers()
    publisher.faults.double_live = True

    async def run() -> None:
        with scene() as at:
            at.ingest.pod_added(spec(publisher))
            await at.until_exact(publisher)
            publisher.publish(50)
            await at.until_exact(publisher)
            await at.until(lambda: at.ingest.counters()["duplicates"] >= 25, "duplicates were seen")
            assert at.ledger.entry().resets == []

    asyncio.run(run())


def test_a_replay_cut_short_is_resumed(publishers: Callable[..., Publisher]) -> None:
    publisher = publishers()
    publisher.publish(25)
    publisher.faults.replies_max = 10

    async def run() -> None:
        with scene() as at:
            at.ingest.pod_added(spec(publisher))
            await at.until_exact(publisher)
            assert at.ledger.entry().replays >= 3
            assert SourceState.DEGRADED not in at.ledger.entry().states
            assert at.ingest.counters()["replay_timeouts"] >= 2

    asyncio.run(run())


def test_a_restart_in_place(publishers: Callable[..., Publisher]) -> None:
    publisher = publishers()
    publisher.publish(30)

    async def run() -> None:
        with scene() as at:
            at.ingest.pod_added(spec(publisher))
            await at.until_exact(publisher)
            publisher.restart_in_place()
            publisher.publish(3)
            await at.until_exact(publisher)
            assert at.ledger.entry().resets == [True]
            assert at.ledger.entry().seqs == [0, 1, 2]

    asyncio.run(run())


@pytest.mark.parametrize("published_after", [1, 12, 30])
def test_killed_and_started_again(publishers: Callable[..., Publisher], published_after: int) -> None:
    first = publishers()
    first.publish(12)

    async def run() -> None:
        with scene() as at:
            at.ingest.pod_added(spec(first))
            await at.until_exact(first)
            await asyncio.to_thread(first.kill)
            await at.until_state(SourceState.DOWN)
            assert len(at.ledger.entry().batches) == 12, "what it held is kept until the deadline"
            second = publishers(port=first.port, replay_port=first.replay_port)
            second.incarnation = 1
            second.publish(published_after)
            await at.until_exact(second)
            assert at.ledger.entry().resets == [True]
            assert at.ledger.entry().states.count(SourceState.DEGRADED) == 0

    asyncio.run(run())


def test_another_engine_whose_number_fits_while_no_replay_answers(
    publishers: Callable[..., Publisher],
) -> None:
    first = publishers()
    first.publish(3)

    async def run() -> None:
        with scene() as at:
            at.ingest.pod_added(spec(first))
            await at.until_exact(first)
            await asyncio.to_thread(first.kill)
            await at.until_state(SourceState.DOWN)
            second = publishers(port=first.port, replay_port=first.replay_port)
            second.incarnation = 1
            second.faults.serve_replays = False
            second.faults.drop_live = True
            second.publish(3)
            second.faults.drop_live = False
            await at.until_state(SourceState.CATCHING_UP)
            timeouts = at.ingest.counters()["replay_timeouts"]
            second.publish(1)  # number 3, just what would have come next of the first
            await at.until(lambda: at.ingest.counters()["replay_timeouts"] > timeouts, "no reply")
            second.faults.serve_replays = True
            await at.until_exact(second)
            assert at.ledger.entry().resets == [True]

    asyncio.run(run())


def test_silence_past_the_deadline(publishers: Callable[..., Publisher]) -> None:
    publisher = publishers()
    publisher.publish(4)
    settings = dataclasses.replace(
        SETTINGS, sequence=dataclasses.replace(SEQUENCE, disconnect_deadline_s=0.2)
    )

    async def run() -> None:
        with scene(settings) as at:
            at.ingest.pod_added(spec(publisher))
            await at.until_exact(publisher)
            entry = at.ledger.entry()
            resets = len(entry.resets)  # one, if connecting took longer than the short deadline
            await asyncio.to_thread(publisher.kill)
            await at.until(lambda: len(entry.resets) > resets, "reset at the deadline")
            assert entry.resets[-1] is False
            assert entry.batches == []
            assert entry.states[-1] is SourceState.DOWN

    asyncio.run(run())


def test_a_rolled_over_buffer_degrades_until_the_engine_restarts(
    publishers: Callable[..., Publisher],
) -> None:
    publisher = publishers(buffer_batches=5)
    publisher.publish(20)

    async def run() -> None:
        with scene() as at:
            at.ingest.pod_added(spec(publisher))
            await at.until(lambda: at.ledger.entry().seqs == [15, 16, 17, 18, 19], "the rest of the buffer")
            await at.until_state(SourceState.DEGRADED)
            assert at.ledger.entry().gaps == 1
            publisher.publish(1)
            await at.until(lambda: at.ledger.entry().seqs[-1:] == [20], "the stream goes on")
            assert at.ledger.state() is SourceState.DEGRADED
            publisher.restart_in_place()
            publisher.publish(2)
            await at.until_exact(publisher)

    asyncio.run(run())


def test_without_a_replay_endpoint(publishers: Callable[..., Publisher]) -> None:
    publisher = publishers(replay=False)

    async def run() -> None:
        with scene() as at:
            at.ingest.pod_added(spec(publisher, replay_endpoint=None))
            await at.until_state(SourceState.CATCHING_UP)
            # The subscription may reach the publisher late; then batches are lost, and that is told.
            while at.ledger.entry().seqs == []:
                publisher.publish(1)
                await asyncio.sleep(0.01)
            if at.ledger.entry().seqs[0] > 0:
                await at.until_state(SourceState.DEGRADED)
            publisher.restart_in_place()
            publisher.publish(3)
            await at.until_exact(publisher)
            publisher.faults.drop_live = True
            publisher.publish(1)
            publisher.faults.drop_live = False
            publisher.publish(1)
            await at.until(lambda: at.ledger.entry().seqs == [0, 1, 2, 4], "the rest")
            await at.until_state(SourceState.DEGRADED)

    asyncio.run(run())


def test_the_bind_side_and_a_port_that_is_taken(publishers: Callable[..., Publisher]) -> None:
    taken = socket.socket()
    taken.bind(("0.0.0.0", 0))
    taken.listen()
    port = taken.getsockname()[1]
    publisher = publishers(connect_to=f"tcp://127.0.0.1:{port}")
    publisher.publish(3)

    async def run() -> None:
        with scene() as at:
            at.ingest.pod_added(spec(publisher, zmq_endpoint=f"tcp://*:{port}"))
            await at.until(
                lambda: "Address already in use" in at.ledger.entry().causes[-1], "the reason is told"
            )
            assert at.ledger.state() is SourceState.DOWN
            taken.close()
            await at.until_exact(publisher)
            publisher.publish(5)
            await at.until_exact(publisher)
            await asyncio.to_thread(publisher.kill)
            await at.until_state(SourceState.DOWN)

    try:
        asyncio.run(run())
    finally:
        taken.close()


def test_each_rank_has_its_own_stream(publishers: Callable[..., Publisher]) -> None:
    zero = publishers()
    one = None
    while one is None:
        try:
            one = publishers(port=zero.port + 1, replay_port=zero.replay_port + 1)
        except zmq.ZMQError:
            zero = publishers()
    zero.publish(3)
    one.publish(7)

    async def run() -> None:
        assert one is not None
        with scene() as at:
            at.ingest.pod_added(spec(zero, dp_size=2))
            await at.until_exact(zero, dp_rank=0)
            await at.until_exact(one, dp_rank=1)
            one.restart_in_place()
            one.publish(1)
            await at.until_exact(one, dp_rank=1)
            assert at.ledger.entry("pod", 0).resets == []

    asyncio.run(run())


def test_only_the_topic_that_was_asked_for(publishers: Callable[..., Publisher]) -> None:
    publisher = publishers(topic=b"kv@a")

    async def run() -> None:
        with scene() as at:
            at.ingest.pod_added(spec(publisher, topic="kv@a"))
            at.ingest.pod_added(spec(publisher, name="other", topic="kv@b", replay_endpoint=None))
            await at.until_exact(publisher)
            await at.until_state(SourceState.CATCHING_UP, "other")
            publisher.publish(5)
            await at.until_exact(publisher)
            assert at.ledger.entry("other").seqs == []

    asyncio.run(run())


def test_a_lost_tail_is_found_while_nothing_comes(publishers: Callable[..., Publisher]) -> None:
    publisher = publishers()
    publisher.publish(2)

    async def run() -> None:
        with scene() as at:
            at.ingest.pod_added(spec(publisher))
            await at.until_exact(publisher)
            publisher.faults.drop_live = True
            publisher.publish(2)
            await at.until_exact(publisher)

    asyncio.run(run())


def test_a_silent_replay_socket_degrades_and_heals(publishers: Callable[..., Publisher]) -> None:
    publisher = publishers()
    publisher.publish(3)
    publisher.faults.serve_replays = False
    settings = dataclasses.replace(SETTINGS, sequence=dataclasses.replace(SEQUENCE, replay_timeout_s=0.1))

    async def run() -> None:
        with scene(settings) as at:
            at.ingest.pod_added(spec(publisher))
            await at.until_state(SourceState.DEGRADED)
            assert any("silent" in cause for cause in at.ledger.entry().causes)
            publisher.publish(2)
            await at.until(lambda: at.ledger.entry().seqs == [3, 4], "the stream goes on")
            publisher.faults.serve_replays = True
            await at.until_exact(publisher)

    asyncio.run(run())


def test_a_removed_pod_gives_back_what_was_held_for_it(publishers: Callable[..., Publisher]) -> None:
    """All sources share these bytes: what a pod that is gone kept of them nobody else could hold."""
    publisher = publishers()
    publisher.publish(1)
    publisher.faults.serve_replays = False

    async def run() -> None:
        with scene() as at:
            at.ingest.pod_added(spec(publisher))
            await at.until_state(SourceState.CATCHING_UP)
            publisher.publish(3)
            await at.until(lambda: at.ingest.gauges()["held_bytes"] > 0, "they wait for the replay")
            at.ingest.pod_removed("pod")
            await at.until(lambda: at.ingest.gauges()["held_bytes"] == 0, "nobody waits for it any more")

    asyncio.run(run())


def test_what_cannot_be_read_degrades_until_a_clear(publishers: Callable[..., Publisher]) -> None:
    publisher = publishers()

    async def run() -> None:
        with scene() as at:
            at.ingest.pod_added(spec(publisher))
            publisher.publish(2)
            await at.until_exact(publisher)
            publisher.publish_raw([b"", b"one frame too few"])
            publisher.publish_raw([b"", b"\xff" * 8, b"the end of what?"])
            publisher.publish_raw([b"", b"short", b""])
            await at.until(lambda: at.ingest.counters()["messages_malformed"] == 3, "malformed messages")
            assert at.ledger.state() is SourceState.LIVE
            publisher.publish_payload(b"\xc1 not msgpack")
            publisher.publish(1)
            await at.until(lambda: at.ledger.entry().seqs == [0, 1, 2, 3], "the stream goes on")
            assert at.ledger.state() is SourceState.DEGRADED
            assert at.ledger.entry().batches[2].events == ()
            assert at.ingest.counters()["batches_unreadable"] == 1
            publisher.publish_payload(payload_of(4, cleared=True))
            await at.until_state(SourceState.LIVE)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("event", "state"),
    [
        ({"type": "BlockRemoved", "block_hashes": "what?", "medium": "GPU"}, SourceState.DEGRADED),
        ({"type": "AllBlocksCleared", "medium": "CPU"}, SourceState.DEGRADED),
        ({"type": "SomethingNew", "block_hashes": [1]}, SourceState.LIVE),
        ({"type": "BlockRemoved", "block_hashes": [1], "medium": "a tier of its own"}, SourceState.LIVE),
    ],
)
def test_an_event_that_may_have_taken_blocks_away_degrades_when_it_cannot_be_read(
    publishers: Callable[..., Publisher], event: dict[str, object], state: SourceState
) -> None:
    publisher = publishers()

    async def run() -> None:
        with scene() as at:
            at.ingest.pod_added(spec(publisher))
            publisher.publish(2)
            await at.until_exact(publisher)
            publisher.publish_payload(msgspec.msgpack.encode([1.0, [event], 0]))
            publisher.publish(1)
            await at.until(lambda: at.ledger.entry().seqs == [0, 1, 2, 3], "the stream goes on")
            assert at.ledger.state() is state
            publisher.publish_payload(payload_of(4, cleared=True))
            await at.until(lambda: at.ledger.entry().seqs[-1] == 4, "a clear makes up for it")
            assert at.ledger.state() is SourceState.LIVE

    asyncio.run(run())


def test_a_full_queue_stops_the_reading_and_loses_nothing(publishers: Callable[..., Publisher]) -> None:
    publisher = publishers()
    settings = dataclasses.replace(SETTINGS, queue=QueueLimits(queue_batches_max=8), slice_s=0.01)

    async def run() -> None:
        with scene(settings) as at:
            at.ingest.pod_added(spec(publisher))
            await at.until_exact(publisher)
            publisher.publish(3_000)
            await at.until_exact(publisher)
            assert at.ingest.counters()["queue_full_pauses"] > 0
            assert at.ingest.queued_batches == at.ingest.queued_bytes == 0

    asyncio.run(run())


def test_others_have_their_turn_between_two_slices(publishers: Callable[..., Publisher]) -> None:
    publisher = publishers()
    settings = dataclasses.replace(SETTINGS, slice_s=0.0)

    async def run() -> None:
        with scene(settings) as at:
            at.ingest.pod_added(spec(publisher))
            await at.until_exact(publisher)
            publisher.publish(3_000)
            turns = 0
            while len(at.ledger.entry().seqs) < 3_000 and turns < 1_000_000:
                await asyncio.sleep(0)
                turns += 1
            await at.until_exact(publisher)
            assert at.ingest.counters()["drain_slices"] >= 3_000, "a slice of no time is one batch"
            assert turns >= 4 * 2_999, "as many to read as to apply, and two rounds of the loop for each"

    asyncio.run(run())


def test_a_queue_is_bounded_in_bytes_too(publishers: Callable[..., Publisher]) -> None:
    publisher = publishers()
    settings = dataclasses.replace(SETTINGS, queue=QueueLimits(queue_bytes_max=1_000))

    async def run() -> None:
        with scene(settings) as at:
            at.ingest.pod_added(spec(publisher))
            await at.until_exact(publisher)
            publisher.publish(1_000)
            await at.until_exact(publisher)
            assert at.ingest.counters()["queue_full_pauses"] > 0

    asyncio.run(run())


def test_one_message_passes_the_bound_of_a_queue(publishers: Callable[..., Publisher]) -> None:
    publisher = publishers()
    payload = payload_of(0) + bytes(100_000)  # that it cannot be read is found out behind the queue
    settings = dataclasses.replace(
        SETTINGS,
        queue=QueueLimits(queue_bytes_max=1_000),
        slice_s=0.0,
    )

    async def run() -> None:
        with scene(settings) as at:
            at.ingest.pod_added(spec(publisher))
            await at.until_exact(publisher)
            for _ in range(100):
                publisher.publish_payload(payload)
            most = 0
            while len(at.ledger.entry().seqs) < 100:
                most = max(most, at.ingest.queued_bytes)
                await asyncio.sleep(0)
            assert most <= 1_000 + len(payload), "the message that passes it, and not what the socket holds"

    asyncio.run(run())


def test_a_removed_pod_is_silent_and_can_come_back(publishers: Callable[..., Publisher]) -> None:
    publisher, other = publishers(), publishers()
    publisher.publish(3)

    async def run() -> None:
        with scene() as at:
            at.ingest.pod_added(spec(publisher))
            at.ingest.pod_added(spec(other, name="other"))
            await at.until_exact(publisher)
            at.ingest.pod_added(spec(publisher))  # once more changes nothing
            at.ingest.pod_removed("pod")
            at.ingest.pod_removed("never there")
            del at.ledger.sources["pod", 0]
            publisher.publish(3)
            other.publish(3)
            await at.until_exact(other, "other")
            assert ("pod", 0) not in at.ledger.sources
            at.ingest.pod_added(spec(publisher))
            await at.until_exact(publisher)
            assert at.ledger.entry().replays >= 1

    asyncio.run(run())


def test_a_changed_spec_is_followed_anew(publishers: Callable[..., Publisher]) -> None:
    before, after = publishers(), publishers()
    before.publish(3)
    after.publish(4)

    async def run() -> None:
        with scene() as at:
            at.ingest.pod_added(spec(before))
            await at.until_exact(before)
            del at.ledger.sources["pod", 0]  # the service clears a pod whose spec changes
            at.ingest.pod_added(spec(after))
            await at.until_exact(after)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("tcp://127.0.0.1:70000", "port"),
        ("udp://127.0.0.1:5557", "tcp://"),
        ("tcp://no-such-host.invalid:5557", "no address"),
    ],
)
def test_an_impossible_endpoint_is_told_and_stops_nobody(
    publishers: Callable[..., Publisher], endpoint: str, said: str
) -> None:
    publisher = publishers()
    publisher.publish(2)

    async def run() -> None:
        with scene() as at:
            at.ingest.pod_added(spec(publisher, name="wrong", zmq_endpoint=endpoint))
            at.ingest.pod_added(spec(publisher))
            await at.until_exact(publisher)
            await at.until(lambda: said in at.ledger.entry("wrong").causes[-1], f"told: {said}")
            assert at.ledger.state("wrong") is SourceState.DOWN

    asyncio.run(run())


def test_an_engine_that_is_not_there_is_told_once_until_it_comes(
    publishers: Callable[..., Publisher],
) -> None:
    """Nothing listens on its port before it begins, nor when it has ended."""

    async def run() -> None:
        with scene() as at:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            refused = f"tcp://127.0.0.1:{port} refuses connections: nothing listens on that port, or a firewall says no"
            at.ingest.pod_added(PodSpec("pod", "m", zmq_endpoint=f"tcp://127.0.0.1:{port}"))
            await at.until(lambda: at.ledger.entry().causes[-1] == refused, "told")
            engine = publishers(port=port)
            engine.publish(3)
            await at.until(lambda: at.ledger.state() is not SourceState.DOWN, "followed")
            causes = at.ledger.entry().causes
            assert causes.count(refused) == 1, "not each time that it is tried"
            engine.kill()
            await at.until(lambda: at.ledger.entry().causes[-1] == refused, "told again")
            assert at.ledger.state() is SourceState.DOWN

    asyncio.run(run())


def test_an_address_that_does_not_answer_is_told_once(publishers: Callable[..., Publisher]) -> None:
    """Nobody takes connections from a queue that is full, so what is sent to it is dropped as by a firewall."""

    async def run() -> None:
        with scene(IMPATIENT) as at, contextlib.ExitStack() as stack:
            silent = stack.enter_context(socket.socket())
            silent.bind(("127.0.0.1", 0))
            silent.listen(0)
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(silent.getsockname())
            endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
            at.ingest.pod_added(PodSpec("pod", "m", zmq_endpoint=endpoint))
            said = f"no answer from {endpoint}: "
            await at.until(lambda: at.ledger.entry().causes[-1].startswith(said), "told")
            other = publishers()
            other.publish(2)
            at.ingest.pod_added(spec(other, name="other"))
            await at.until_exact(other, "other")
            assert at.ledger.state() is SourceState.DOWN
            assert len([cause for cause in at.ledger.entry().causes if cause.startswith(said)]) == 1

    asyncio.run(run())


def test_an_engine_behind_something_that_was_none_is_followed(publishers: Callable[..., Publisher]) -> None:
    """Something else had its port, and broke the protocol: ZMQ gives such a peer up for good, the ingest does not."""
    publisher = publishers()
    publisher.publish(2)

    async def run() -> None:
        with scene() as at, socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            at.ingest.pod_added(spec(publisher, zmq_endpoint=f"tcp://127.0.0.1:{port}"))
            connection, _ = await asyncio.to_thread(other.accept)
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64))
                other.close()
                await asyncio.to_thread(connection.recv, 65_536)
            engine = publishers(port=port)
            engine.publish(3)
            await at.until(lambda: at.ledger.state() is not SourceState.DOWN, "followed")

    asyncio.run(run())


class _Web(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass


class _WebThatStaysOpen(_Web):
    def send_error(self, *_: object, **__: object) -> None:
        self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n")
        self.rfile.read()


class _Silent(_Web):
    def handle(self) -> None:
        self.rfile.read()


@contextmanager
def web(handler: type[_Web], port: int = 0) -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


IMPATIENT = dataclasses.replace(SETTINGS, sockets=dataclasses.replace(SOCKETS, handshake_patience_s=0.3))


@pytest.mark.parametrize("handler", [_Web, _WebThatStaysOpen, _Silent])
def test_what_is_no_publisher_is_told_and_an_engine_behind_it_followed(
    publishers: Callable[..., Publisher], handler: type[_Web]
) -> None:
    """A web server that closes, one that does not, and one that says nothing at all."""
    said = "connected to tcp://127.0.0.1:{}, but the handshake fails: "

    async def run() -> None:
        with scene(IMPATIENT) as at:
            with web(handler) as port:
                at.ingest.pod_added(PodSpec("pod", "m", zmq_endpoint=f"tcp://127.0.0.1:{port}"))
                await at.until(
                    lambda: at.ledger.entry().causes[-1].startswith(said.format(port)), "told what is wrong"
                )
                assert at.ledger.state() is SourceState.DOWN
                failures = at.ingest.counters()["handshake_failures"]
                assert failures > 0
                await at.until(
                    lambda: at.ingest.counters()["handshake_failures"] > failures + 1, "tried again"
                )
            told = [cause for cause in at.ledger.entry().causes if cause.startswith(said.format(port))]
            assert len(told) < at.ingest.counters()["handshake_failures"], "not each time that it fails"
            await at.until(lambda: "refuses connections" in at.ledger.entry().causes[-1], "it has gone")
            publishers(port=port).publish(3)
            await at.until(lambda: at.ledger.state() is not SourceState.DOWN, "followed")

    asyncio.run(run())


def test_another_kind_of_zmq_socket_is_told(publishers: Callable[..., Publisher]) -> None:
    """The engine's replay port in place of its stream, say."""
    del publishers

    async def run() -> None:
        with scene(IMPATIENT) as at, zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            port = router.bind_to_random_port("tcp://127.0.0.1")
            at.ingest.pod_added(PodSpec("pod", "m", zmq_endpoint=f"tcp://127.0.0.1:{port}"))
            await at.until(lambda: "the handshake fails" in at.ledger.entry().causes[-1], "told")
            assert at.ledger.state() is SourceState.DOWN

    asyncio.run(run())


def test_a_message_that_is_too_long_ends_its_connection_and_no_more(
    publishers: Callable[..., Publisher],
) -> None:
    publisher = publishers()
    publisher.publish(2)
    settings = dataclasses.replace(SETTINGS, sockets=dataclasses.replace(SOCKETS, message_bytes_max=100_000))

    async def run() -> None:
        with scene(settings) as at:
            at.ingest.pod_added(spec(publisher))
            await at.until_exact(publisher)
            publisher.publish_raw([b"", (2).to_bytes(8, "big"), bytes(100_001)])
            await at.until_state(SourceState.DOWN)
            publisher.publish(3)
            await at.until_exact(publisher)

    asyncio.run(run())


def test_a_writer_that_refuses_one_pod_is_fed_the_others(publishers: Callable[..., Publisher]) -> None:
    refused, other = publishers(), publishers()
    refused.publish(2)
    other.publish(2)

    async def run() -> None:
        with scene() as at:
            at.ledger.refused_pods.add("refused")
            at.ingest.pod_added(spec(refused, name="refused"))
            at.ingest.pod_added(spec(other))
            await at.until_exact(other)
            await at.until(lambda: at.ingest.counters()["batches_refused"] == 2, "refusals are counted")
            await at.until_state(SourceState.DEGRADED, "refused")

    asyncio.run(run())


def test_more_replays_than_may_run_at_once_take_turns(publishers: Callable[..., Publisher]) -> None:
    fleet = [publishers() for _ in range(6)]
    for publisher in fleet:
        publisher.publish(10)
    settings = dataclasses.replace(SETTINGS, sockets=dataclasses.replace(SOCKETS, replays_max=1))

    async def run() -> None:
        with scene(settings) as at:
            for number, publisher in enumerate(fleet):
                at.ingest.pod_added(spec(publisher, name=f"pod-{number}"))
            for number, publisher in enumerate(fleet):
                await at.until_exact(publisher, f"pod-{number}")

    asyncio.run(run())


def test_every_socket_is_told_of_in_its_turn(
    publishers: Callable[..., Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.ingest.sockets._TOLD_MAX", 1)
    fleet = [publishers() for _ in range(4)]

    async def run() -> None:
        with scene() as at:
            for number, publisher in enumerate(fleet):
                at.ingest.pod_added(spec(publisher, name=f"pod-{number}"))
            for _ in range(20):
                for publisher in fleet:
                    publisher.publish(5)
                await asyncio.sleep(0)
            for number, publisher in enumerate(fleet):
                await at.until_exact(publisher, f"pod-{number}")

    asyncio.run(run())


def test_what_came_while_the_loop_stood_still_is_not_overdue(
    publishers: Callable[..., Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.ingest.sockets._TOLD_MAX", 1)
    fleet = [publishers() for _ in range(4)]
    go_on = threading.Event()

    async def run() -> None:
        with scene() as at:
            for number, publisher in enumerate(fleet):
                publisher.publish(5)
                publisher.begin(go_on.wait)
                at.ingest.pod_added(spec(publisher, name=f"pod-{number}"))
            await at.until(lambda: at.ingest.gauges()["replays_running"] == len(fleet), "all have asked")
            go_on.set()
            stalled_until_s = time.monotonic() + 1.5 * SEQUENCE.replay_timeout_s
            while time.monotonic() < stalled_until_s or not all(
                publisher.replays_served for publisher in fleet
            ):
                time.sleep(0.01)  # noqa: ASYNC251
            for number, publisher in enumerate(fleet):
                await at.until_exact(publisher, f"pod-{number}")
            assert at.ingest.counters()["replay_timeouts"] == 0, "the replies were there before the tick"

    try:
        asyncio.run(run())
    finally:
        go_on.set()


def test_a_source_that_floods_leaves_the_others_their_turn(publishers: Callable[..., Publisher]) -> None:
    flooding, other = publishers(), publishers()
    settings = dataclasses.replace(SETTINGS, slice_s=0.0)

    async def run() -> None:
        with scene(settings) as at:
            at.ingest.pod_added(spec(flooding, name="flooding"))
            at.ingest.pod_added(spec(other))
            await at.until_exact(flooding, "flooding")
            await at.until_exact(other)
            flooding.publish(4_000)
            other.publish(5)
            await at.until(lambda: len(at.ledger.entry().seqs) == 5, "the other is served in between")
            assert len(at.ledger.entry("flooding").seqs) < 2_000

    asyncio.run(run())


def test_ticks_that_take_longer_than_their_interval_leave_the_reading_its_turn(
    publishers: Callable[..., Publisher],
) -> None:
    publisher = publishers()
    settings = dataclasses.replace(
        SETTINGS, sockets=dataclasses.replace(SOCKETS, tick_interval_s=0.001), slice_s=0.0
    )

    async def keep_busy() -> None:
        while True:
            time.sleep(0.001)  # noqa: ASYNC251
            await asyncio.sleep(0)

    async def run() -> None:
        with scene(settings) as at:
            busy = asyncio.create_task(keep_busy())
            for number in range(40):
                absent = spec(publisher, name=f"absent-{number}", zmq_endpoint="tcp://127.0.0.1:1")
                at.ingest.pod_added(absent)
            at.ingest.pod_added(spec(publisher))
            publisher.publish(20)
            await at.until_exact(publisher)
            busy.cancel()

    asyncio.run(run())


def test_pods_that_go_while_others_are_being_followed(publishers: Callable[..., Publisher]) -> None:
    publisher = publishers()
    publisher.publish(3)
    settings = dataclasses.replace(SETTINGS, slice_s=0.0)  # one is opened in a turn

    async def run() -> None:
        with scene(settings) as at:
            before = len(os.listdir("/proc/self/fd"))
            for number in range(40):
                at.ingest.pod_added(spec(publisher, name=f"pod-{number}", dp_size=1))
            await at.until(lambda: len(os.listdir("/proc/self/fd")) > before + 10, "some are open")
            for number in range(39):
                at.ingest.pod_removed(f"pod-{number}")
                del at.ledger.sources[f"pod-{number}", 0]
            await at.until_exact(publisher, "pod-39")
            await asyncio.sleep(5 * SOCKETS.tick_interval_s)
            publisher.publish(3)
            await at.until_exact(publisher, "pod-39")
            assert set(at.ledger.sources) == {("pod-39", 0)}, "of who is gone nothing is told"
            await at.until(lambda: len(os.listdir("/proc/self/fd")) < before + 10, "nor is anything open")

    asyncio.run(run())


def test_on_the_loop_that_serves(publishers: Callable[..., Publisher]) -> None:
    publisher = publishers()
    publisher.publish(20)

    async def run() -> None:
        with scene() as at:
            at.ingest.pod_added(spec(publisher))
            for _ in range(3):
                await at.until_exact(publisher)
                await asyncio.sleep(2 * SOCKETS.tick_interval_s)  # it listens, and ticks
                publisher.publish(5)
            publisher.restart_in_place()
            publisher.publish(3)
            await at.until_exact(publisher)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_pods_added_before_the_start_are_followed(publishers: Callable[..., Publisher]) -> None:
    publisher = publishers()
    publisher.publish(2)

    async def run() -> None:
        ledger = Ledger()
        ingest = ZmqIngest(ledger, SETTINGS)
        ingest.pod_added(spec(publisher))
        ingest.start()
        try:
            await Scene(ledger, ingest).until_exact(publisher)
        finally:
            ingest.stop()
            ingest.stop()

    asyncio.run(run())


class FaultyFeed(Feed):
    """Fails once, in the middle of one stream."""

    failures = 1
    failing: type[Action] = Deliver

    def put(self, stream: Stream, action: Action) -> None:
        is_next = not isinstance(action, Deliver) or action.seq == 2
        if stream.pod == "faulty" and isinstance(action, self.failing) and is_next and self.failures:
            self.failures -= 1
            self.failing = Reset  # from here on, while there are failures left
            raise RuntimeError("made by the test")
        super().put(stream, action)


@pytest.mark.parametrize("failures", [1, 4])
def test_a_fault_of_our_own_costs_its_source_a_fresh_start_and_no_other(
    publishers: Callable[..., Publisher], caplog: pytest.LogCaptureFixture, failures: int
) -> None:
    """Not even where the fresh start fails in its turn: then every source has one, as often as it takes. It begins with
    nothing, wherever it had been followed from before."""
    faulty, other = publishers(), publishers()
    faulty.publish(4)
    other.publish(4)
    known = (3, digest(other.batches[3])) if failures > 1 else None

    def followed(name: str, publisher: Publisher, resume_at: tuple[int, int] | None = None) -> FollowedPod:
        live = Endpoint("127.0.0.1", publisher.port)
        replay = Endpoint("127.0.0.1", publisher.replay_port)
        stream = Stream(name, 0, str(live), str(replay), resume_at=resume_at)
        return FollowedPod(name, b"", ((stream, live, replay),))

    async def run() -> None:
        ledger = Ledger()
        turns = Turns(asyncio.get_running_loop(), slice_s=0.001)
        feed = FaultyFeed(ledger, decode_batch, QueueLimits(), turns, lambda: receiver.wake())
        feed.failures = failures
        receiver = Receiver(feed, turns, SEQUENCE, SOCKETS)
        receiver.follow(followed("faulty", faulty))
        receiver.follow(followed("other", other, known))
        receiver.start()
        try:
            at = Scene(ledger, ZmqIngest(ledger))
            await at.until(lambda: ledger.is_exact(faulty, "faulty"), "the fresh start brings everything")
            await at.until(
                lambda: ledger.is_exact(other, "other"), "the other never noticed, or has all of it again"
            )
            assert receiver.counters.faults == failures
            assert set(ledger.entry("faulty").resets) == {False}
            assert ledger.entry("other").resets == [] or failures > 1
        finally:
            receiver.stop()

    with caplog.at_level("ERROR"):
        asyncio.run(run())
    assert "made by the test" in caplog.text


def test_an_end_in_the_middle_of_it_is_quiet(
    publishers: Callable[..., Publisher], caplog: pytest.LogCaptureFixture
) -> None:
    publisher = publishers()
    publisher.publish(100)

    async def run() -> None:
        ledger = Ledger()
        ingest = ZmqIngest(ledger, dataclasses.replace(SETTINGS, slice_s=0.0))
        at = Scene(ledger, ingest)
        ingest.start()
        ingest.pod_added(spec(publisher))
        await at.until(lambda: len(ledger.entry().seqs) > 20, "it is reading, and more is queued")
        ingest.pod_added(spec(publisher, name="late"))
        ingest.stop()
        applied = len(ledger.entry().seqs)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(ledger.entry().seqs) == applied

    with caplog.at_level("WARNING"):
        asyncio.run(run())
    assert not caplog.records


def test_a_source_that_cannot_be_watched_is_down_and_tried_again(
    publishers: Callable[..., Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = publishers()
    publisher.publish(3)
    register = Sockets._register
    refused = 4

    def full(self: Sockets, *arguments: Any) -> None:
        nonlocal refused
        refused -= 1
        if refused >= 0:
            raise zmq.ZMQError(errno.ENOSPC)
        register(self, *arguments)

    monkeypatch.setattr(Sockets, "_register", full)

    async def run() -> None:
        before = len(os.listdir("/proc/self/fd"))
        with scene() as at:
            at.ingest.pod_added(spec(publisher))
            await at.until_exact(publisher)
            assert any("No space left" in cause for cause in at.ledger.entry().causes)
            assert at.ingest.counters()["open_failures"] >= 1
            at.ingest.pod_removed("pod")
            await at.until(lambda: len(os.listdir("/proc/self/fd")) <= before + 8, "nothing stays open")

    asyncio.run(run())


def test_neither_descriptors_nor_threads_are_left(publishers: Callable[..., Publisher]) -> None:
    publisher = publishers()
    publisher.publish(2)

    async def run() -> None:
        before = set(os.listdir("/proc/self/fd")), threading.active_count()
        with scene() as at:
            for _ in range(3):
                at.ingest.pod_added(spec(publisher))
                at.ingest.pod_added(spec(publisher, name="absent", zmq_endpoint="tcp://127.0.0.1:1"))
                await at.until_exact(publisher)
                at.ingest.pod_removed("pod")
                at.ingest.pod_removed("absent")
                at.ledger.sources.clear()
        # The publisher in this process notices the end of its connections in its own time.
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + DEADLINE_S
        while (len(os.listdir("/proc/self/fd")), threading.active_count()) != (len(before[0]), before[1]):
            assert loop.time() < give_up_at_s, (before, os.listdir("/proc/self/fd"), threading.enumerate())
            await asyncio.sleep(0.01)

    asyncio.run(run())
