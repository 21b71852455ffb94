"""The publisher over real sockets, read the way an indexer reads an engine."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from app.errors import InvalidSettings, Overloaded
from app.simulator.publisher import Publisher, PublisherSettings, _Flush

DEADLINE_MS = 10_000
END_OF_REPLAY = b"\xff" * 8
DEADLINE_S = DEADLINE_MS / 1000


class Peers:
    """The sockets of a test's indexer side, closed with it."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.rcvtimeo = DEADLINE_MS
        made.linger = 0
        self._sockets.append(made)
        return made

    def close(self) -> None:
        for made in self._sockets:
            made.close()
        self._context.term()


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    made.close()


def subscribe(peers: Peers, publisher: Publisher, topic: bytes = b"") -> zmq.Socket[bytes]:
    sub = peers.socket(zmq.SUB)
    before = publisher.subscribers
    sub.setsockopt(zmq.SUBSCRIBE, topic)
    sub.connect(publisher.endpoint)
    assert publisher.wait_subscribed(DEADLINE_S, before + 1)
    return sub


def ask_replay(peers: Peers, publisher: Publisher, first: int) -> zmq.Socket[bytes]:
    dealer = peers.socket(zmq.DEALER)
    assert publisher.replay_endpoint is not None
    dealer.connect(publisher.replay_endpoint)
    dealer.send_multipart((b"", first.to_bytes(8, "big")))
    return dealer


def frames(first: int, last: int, topic: bytes = b"") -> list[list[bytes]]:
    return [[topic, seq.to_bytes(8, "big"), b"payload %d" % seq] for seq in range(first, last + 1)]


def publish(publisher: Publisher, first: int, last: int) -> None:
    for seq in range(first, last + 1):
        publisher.publish(seq, b"payload %d" % seq)


def test_frames_are_topic_number_and_payload(peers: Peers) -> None:
    with Publisher(PublisherSettings(topic="kv@pod")) as publisher:
        sub = subscribe(peers, publisher, b"kv@")
        publish(publisher, 0, 2)
        assert [sub.recv_multipart() for _ in range(3)] == frames(0, 2, b"kv@pod")


def test_only_subscriptions_that_will_get_frames_count(peers: Peers) -> None:
    with Publisher(PublisherSettings(topic="kv@pod")) as publisher:
        other = peers.socket(zmq.SUB)
        other.setsockopt(zmq.SUBSCRIBE, b"another topic")
        other.connect(publisher.endpoint)
        sub = subscribe(peers, publisher)
        assert publisher.subscribers == 1
        sub.close()
        with publisher._subscribed:
            assert publisher._subscribed.wait_for(lambda: publisher.subscribers == 0, DEADLINE_S)


@pytest.mark.parametrize("topic_frame", [True, False])
def test_replay_starts_where_asked_and_ends_with_the_marker(peers: Peers, topic_frame: bool) -> None:
    with Publisher(PublisherSettings(topic="t", replay_topic_frame=topic_frame)) as publisher:
        publish(publisher, 0, 9)
        assert publisher.flush(DEADLINE_S)
        dealer = ask_replay(peers, publisher, 7)
        head = [b"", b"t"] if topic_frame else [b""]
        for _, seq, payload in frames(7, 9):
            assert dealer.recv_multipart() == [*head, seq, payload]
        end = [b"", b"", END_OF_REPLAY, b""] if topic_frame else [b"", END_OF_REPLAY, b""]
        assert dealer.recv_multipart() == end
        assert publisher.replays_served == 1


def test_replay_beyond_the_newest_is_just_the_marker(peers: Peers) -> None:
    with Publisher() as publisher:
        publish(publisher, 0, 3)
        assert publisher.flush(DEADLINE_S)
        assert ask_replay(peers, publisher, 4).recv_multipart() == [b"", b"", END_OF_REPLAY, b""]


def test_buffer_keeps_only_the_last_steps(peers: Peers) -> None:
    with Publisher(PublisherSettings(buffer_steps=4)) as publisher:
        publish(publisher, 0, 9)
        assert publisher.flush(DEADLINE_S)
        dealer = ask_replay(peers, publisher, 0)
        seqs = [int.from_bytes(dealer.recv_multipart()[-2], "big") for _ in range(4)]
        assert seqs == [6, 7, 8, 9]
        assert dealer.recv_multipart()[-2] == END_OF_REPLAY


def test_lost_frame_can_be_replayed_and_a_duplicate_comes_twice(peers: Peers) -> None:
    with Publisher() as publisher:
        sub = subscribe(peers, publisher)
        publisher.publish(0, b"payload 0")
        publisher.publish(1, b"payload 1", copies=0)
        publisher.publish(2, b"payload 2", copies=2)
        zeroth, second = frames(0, 0)[0], frames(2, 2)[0]
        assert [sub.recv_multipart() for _ in range(3)] == [zeroth, second, second]
        assert ask_replay(peers, publisher, 1).recv_multipart()[-2:] == frames(1, 1)[0][1:]


def test_truncated_replay_has_no_marker_and_can_be_resumed(peers: Peers) -> None:
    with Publisher() as publisher:
        publish(publisher, 0, 9)
        publisher.limit_replays(4)
        assert publisher.flush(DEADLINE_S)
        dealer = ask_replay(peers, publisher, 0)
        for _, seq, payload in frames(0, 3):
            assert dealer.recv_multipart()[-2:] == [seq, payload]
        # The next reply belongs to the next question: no marker came in between.
        dealer.send_multipart((b"", (8).to_bytes(8, "big")))
        assert [dealer.recv_multipart()[-2] for _ in range(3)] == [
            (8).to_bytes(8, "big"),
            (9).to_bytes(8, "big"),
            END_OF_REPLAY,
        ]


def test_restart_in_place_forgets_what_it_could_replay(peers: Peers) -> None:
    with Publisher() as publisher:
        sub = subscribe(peers, publisher)
        publish(publisher, 0, 5)
        publisher.restart()
        publish(publisher, 0, 1)
        assert [sub.recv_multipart() for _ in range(8)] == frames(0, 5) + frames(0, 1)
        dealer = ask_replay(peers, publisher, 0)
        assert [dealer.recv_multipart()[-2:] for _ in range(2)] == [frame[1:] for frame in frames(0, 1)]
        assert dealer.recv_multipart()[-2] == END_OF_REPLAY


@pytest.mark.parametrize("question", [(b"",), (b"", b"short"), (b"", bytes(8), b"more"), (b"x", bytes(8))])
def test_malformed_replay_request_is_counted_and_ignored(peers: Peers, question: tuple[bytes, ...]) -> None:
    with Publisher() as publisher:
        publish(publisher, 0, 0)
        assert publisher.flush(DEADLINE_S)
        dealer = peers.socket(zmq.DEALER)
        assert publisher.replay_endpoint is not None
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart(question)
        dealer.send_multipart((b"", bytes(8)))
        assert dealer.recv_multipart()[-2:] == frames(0, 0)[0][1:]
        assert publisher.requests_refused == 1


def test_connect_side_reaches_a_bound_subscriber(peers: Peers) -> None:
    sub = peers.socket(zmq.SUB)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    sub.bind("tcp://127.0.0.1:*")
    endpoint = sub.getsockopt_string(zmq.LAST_ENDPOINT)
    with Publisher(PublisherSettings(endpoint=endpoint, bind=False, replay_endpoint=None)) as publisher:
        # A bound SUB socket subscribes on a new connection only when somebody reads from it.
        deadline = time.monotonic() + DEADLINE_S
        while not publisher.wait_subscribed(0.01) and time.monotonic() < deadline:
            sub.poll(10)
        publish(publisher, 0, 0)
        assert sub.recv_multipart() == frames(0, 0)[0]


def test_taken_port_is_named() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InvalidSettings, match=endpoint):
            Publisher(PublisherSettings(replay_endpoint=endpoint))


def test_endpoints_are_free_again_after_a_stop(peers: Peers) -> None:
    first = Publisher()
    first.stop()
    first.stop()
    assert first.replay_endpoint is not None
    with Publisher(PublisherSettings(first.endpoint, first.replay_endpoint)) as second:
        sub = subscribe(peers, second)
        publish(second, 0, 0)
        assert sub.recv_multipart() == frames(0, 0)[0]


class Gate(threading.Event):
    """A flush that holds the publisher's thread until it is let through."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.release = threading.Event()

    def set(self) -> None:
        self.entered.set()
        assert self.release.wait(DEADLINE_S)
        super().set()


def test_full_queue_refuses_the_batch_and_loses_none(peers: Peers) -> None:
    with Publisher(PublisherSettings(queue_batches_max=2)) as publisher:
        sub = subscribe(peers, publisher)
        gate = Gate()
        publisher._command(_Flush(gate))
        assert gate.entered.wait(DEADLINE_S)
        publish(publisher, 0, 1)
        with pytest.raises(Overloaded, match="queue_batches_max"):
            publish(publisher, 2, 2)
        gate.release.set()
        assert [sub.recv_multipart() for _ in range(2)] == frames(0, 1)
