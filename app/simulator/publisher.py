"""The sending half of an engine's KV event stream: numbered payloads out, replays on request.

Frame for frame what vLLM's publisher puts on the wire: `topic, sequence number (8 bytes, big-endian),
payload` on a PUB socket, and a ROUTER socket that answers `"", first wanted number` with what the buffer
still has of it and an end marker; releases from 0.26 on put the topic in front of each reply. The payload
is opaque here: captured bytes or freshly encoded ones go out alike.

The PUB side is an XPUB socket. A subscriber cannot tell the two apart, but this one knows when a
subscription has arrived, so nobody has to guess whether the first frame will be lost.

One thread owns both sockets; everything else talks to it through one bounded queue, in order. Faults are
asked for, never drawn at random: `copies` of a frame (0 loses it on the way, 2 delivers it twice), replays
that stop short without an end marker, and a restart in place. A stop takes effect at once and drops what
has not left.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import queue
import random
import socket
import threading
from typing import Any, Self

import zmq

from app.errors import InvalidSettings, Overloaded, UnreadableBatch
from app.ingest.vllm import (
    Message,
    build_live,
    build_replay_end,
    build_replay_reply,
    parse_replay_request,
)

PORT_ATTEMPTS_MAX = 50
PORTS_FROM, EPHEMERAL_FROM = 16_384, 32_768  # Linux gives connections ports from the second on


@dataclasses.dataclass(frozen=True, slots=True)
class PublisherSettings:
    """`*` as a port takes a free one. Without `bind` the PUB socket connects, to an indexer that binds."""

    endpoint: str = "tcp://127.0.0.1:*"
    replay_endpoint: str | None = "tcp://127.0.0.1:*"
    topic: str = ""
    bind: bool = True
    buffer_steps: int = 10_000  # batches kept for replay
    queue_batches_max: int = 100_000  # handed over and not sent yet
    hwm_messages: int = 100_000  # per subscriber; beyond it frames are lost, as on an engine
    replay_topic_frame: bool = True  # releases from 0.26 on


@dataclasses.dataclass(frozen=True, slots=True)
class _Publish:
    message: Message
    copies: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Restart:
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class _LimitReplay:
    batches: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Flush:
    done: threading.Event


class Publisher:
    """Publishes from construction until `stop`. Safe to call from any thread."""

    def __init__(self, settings: PublisherSettings | None = None) -> None:
        self.settings = settings or PublisherSettings()
        self.endpoint = ""
        self.replay_endpoint: str | None = None
        self.replays_served = 0
        self.requests_refused = 0  # replay requests that are not two frames with eight bytes
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._open()
        except InvalidSettings:
            self._close_sockets()
            raise
        self._commands: queue.Queue[_Publish | _Restart | _LimitReplay | _Flush] = queue.Queue(
            self.settings.queue_batches_max
        )
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._stopping = threading.Event()
        self._subscribers = 0
        self._subscribed = threading.Condition()
        # Only the thread touches what follows.
        self._buffer: collections.deque[Message] = collections.deque(maxlen=self.settings.buffer_steps)
        self._replay_limit: int | None = None
        self._thread = threading.Thread(target=self._run, name="kv-event-publisher", daemon=True)
        self._thread.start()

    # -- called from any thread

    def publish(self, seq: int, payload: bytes, *, copies: int = 1) -> None:
        """Keep the batch for replay and send it `copies` times."""
        self._command(_Publish(Message(seq, payload, self.settings.topic.encode()), copies))

    def restart(self) -> None:
        """What a new engine process on the same endpoints does: it remembers nothing to replay."""
        self._command(_Restart())

    def limit_replays(self, batches: int | None) -> None:
        """From now on a replay ends after this many batches without an end marker; None ends the fault."""
        self._command(_LimitReplay(batches))

    def flush(self, timeout_s: float) -> bool:
        """True when everything handed over before has been given to the sockets."""
        done = threading.Event()
        self._command(_Flush(done))
        return done.wait(timeout_s)

    def wait_subscribed(self, timeout_s: float, subscribers: int = 1) -> bool:
        """True when frames published from now on reach at least that many subscriptions."""
        with self._subscribed:
            return self._subscribed.wait_for(lambda: self._subscribers >= subscribers, timeout_s)

    @property
    def subscribers(self) -> int:
        return self._subscribers

    def stop(self) -> None:
        """Close both sockets and end the thread; what has not left is lost. Harmless when repeated."""
        self._stopping.set()
        self._wake()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _command(self, command: _Publish | _Restart | _LimitReplay | _Flush) -> None:
        assert not self._stopping.is_set(), "a stopped publisher was asked to publish"
        try:
            self._commands.put_nowait(command)
        except queue.Full:
            raise Overloaded(
                f"{self.settings.queue_batches_max} batches wait to be published (queue_batches_max)"
            ) from None
        self._wake()

    def _wake(self) -> None:
        # A full pipe wakes as well as one more byte; a closed one has nobody to wake.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_in.send(b"\0")

    # -- sockets

    def _open(self) -> None:
        self._pub = self._socket(zmq.XPUB)
        self._pub.sndhwm = self.settings.hwm_messages
        self._pub.setsockopt(zmq.XPUB_VERBOSER, 1)
        self.endpoint = self._attach(self._pub, self.settings.endpoint, bind=self.settings.bind)
        self._router: zmq.Socket[bytes] | None = None
        if self.settings.replay_endpoint is not None:
            self._router = self._socket(zmq.ROUTER)
            # Room for one whole replay: a ROUTER silently drops what does not fit.
            self._router.sndhwm = self.settings.buffer_steps + 1
            self.replay_endpoint = self._attach(self._router, self.settings.replay_endpoint, bind=True)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        opened: zmq.Socket[bytes] = self._context.socket(kind)
        opened.linger = 0
        self._sockets.append(opened)
        return opened

    @staticmethod
    def _attach(opened: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> str:
        """The endpoint a peer connects to."""
        try:
            if not bind:
                opened.connect(endpoint)
                return endpoint
            opened.bind(endpoint)
        except zmq.ZMQError as error:
            raise InvalidSettings(f"cannot {'bind' if bind else 'connect to'} {endpoint}: {error}") from error
        return opened.getsockopt_string(zmq.LAST_ENDPOINT)

    def _close_sockets(self) -> None:
        for opened in self._sockets:
            opened.close()
        self._context.term()

    # -- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_out, zmq.POLLIN)
        for opened in self._sockets:
            poller.register(opened, zmq.POLLIN)
        try:
            while not self._stopping.is_set():
                ready = dict(poller.poll())
                self._read_subscriptions()
                if self._router is not None and self._router in ready:
                    self._serve_replay(self._router)
                self._obey()
        finally:
            self._close_sockets()
            self._wake_in.close()
            self._wake_out.close()

    def _read_subscriptions(self) -> None:
        while True:
            try:
                message = self._pub.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            change = {b"\x01": 1, b"\x00": -1}.get(message[:1], 0)
            if self.settings.topic.encode().startswith(message[1:]):
                with self._subscribed:
                    self._subscribers += change
                    self._subscribed.notify_all()

    def _obey(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(4096)
        # What comes in meanwhile wakes the next round, so that replays are served between batches.
        for _ in range(self._commands.qsize()):
            match self._commands.get_nowait():
                case _Publish(message, copies):
                    self._buffer.append(message)
                    for _copy in range(copies):
                        self._pub.send_multipart(build_live(message), zmq.DONTWAIT)
                case _Restart():
                    self._buffer.clear()
                case _LimitReplay(batches):
                    self._replay_limit = batches
                case _Flush(done):
                    done.set()

    def _serve_replay(self, router: zmq.Socket[bytes]) -> None:
        try:
            peer, first = parse_replay_request(router.recv_multipart())
        except UnreadableBatch:
            self.requests_refused += 1
            return
        self.replays_served += 1
        wanted = [message for message in self._buffer if message.seq >= first]
        limit = self._replay_limit
        with_topic = self.settings.replay_topic_frame
        # A ROUTER never blocks: a peer that went away or does not read loses replies, as with an engine.
        for message in wanted[:limit]:
            reply = build_replay_reply(message, with_topic=with_topic)
            router.send_multipart((peer, *reply), zmq.DONTWAIT)
        if limit is None or len(wanted) <= limit:
            router.send_multipart((peer, *build_replay_end(with_topic=with_topic)), zmq.DONTWAIT)


def open_publishers(
    settings: PublisherSettings, *, host: str, port: int, replay_port: int, dp_size: int
) -> list[Publisher]:
    """One a rank, at port + rank for events and for replays alike; port 0 finds free ports in a row."""
    for _ in range(PORT_ATTEMPTS_MAX):
        bases = [base or _some_port(dp_size) for base in (port, replay_port)]
        opened: list[Publisher] = []
        try:
            for dp_rank in range(dp_size):
                endpoint, replay_endpoint = (_endpoint(host, base, dp_rank) for base in bases)
                opened.append(
                    Publisher(
                        dataclasses.replace(settings, endpoint=endpoint, replay_endpoint=replay_endpoint)
                    )
                )
        except InvalidSettings:
            for publisher in opened:
                publisher.stop()
            if port and replay_port:
                raise
        else:
            return opened
    raise InvalidSettings(f"{host} has no {dp_size} free ports in a row for events and for replays")


def _some_port(in_a_row: int) -> int:
    """0, which is any, for a single one: of several the system would choose among ports that connections lie between."""
    return 0 if in_a_row == 1 else random.randrange(PORTS_FROM, EPHEMERAL_FROM - in_a_row)


def _endpoint(host: str, port: int, dp_rank: int) -> str:
    return f"tcp://{host}:{port + dp_rank if port else '*'}"


def port_of(endpoint: str) -> int:
    """Of a TCP endpoint."""
    return int(endpoint.rpartition(":")[2])
