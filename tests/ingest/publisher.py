"""An engine's publisher as real sockets: PUB and ROUTER on one thread, numbering, buffer, and faults to
switch on.

It speaks the protocol of the engines (one thread publishes and serves replays in between), not their
code. `batches` is the truth of this incarnation. Commands run on the thread that owns the sockets; `call`
returns when one is done.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

END = b"\xff" * 8


def payload_of(number: int, incarnation: int = 0, *, cleared: bool = False) -> bytes:
    """A batch whose one stored block is named after its number (1-based, so that no hash is 0)."""
    name = incarnation * 1_000_000 + number + 1
    stored = {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": None,
        "token_ids": [name] * 4,
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    events: list[object] = [{"type": "AllBlocksCleared"}] if cleared else []
    return msgspec.msgpack.encode([1_795_226_400.0 + number, [*events, stored], 0])


@dataclasses.dataclass
class Faults:
    """Read by the publisher's thread before each step; plain assignments switch them."""

    drop_live: bool = False
    double_live: bool = False
    replies_max: int | None = None  # a replay stops after so many replies, without its end marker
    serve_replays: bool = True


class Publisher:
    """Listens on free ports of 127.0.0.1, or on given ones (to come back where it was)."""

    def __init__(
        self,
        *,
        port: int | None = None,
        replay_port: int | None = None,
        topic_in_replies: bool = True,
        buffer_batches: int = 10_000,
        topic: bytes = b"",
        connect_to: str | None = None,
        replay: bool = True,
    ) -> None:
        self.faults = Faults()
        self.batches: list[bytes] = []
        self.incarnation = 0
        self.replays_served = 0
        self.port = self.replay_port = 0
        self._wanted = (port, replay_port)
        self._topic_in_replies = topic_in_replies
        self._topic = topic
        self._connect_to = connect_to
        self._replay = replay
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._commands: queue.SimpleQueue[tuple[Callable[[], object], threading.Event] | None] = (
            queue.SimpleQueue()
        )
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="test-publisher", daemon=True)
        self._thread.start()
        assert self._ready.wait(10), "the publisher starts"
        if self._failure is not None:
            raise self._failure

    # -- from the test

    def publish(self, count: int = 1) -> None:
        def publish() -> None:
            for _ in range(count):
                self._publish()

        self.call(publish)

    def publish_payload(self, payload: bytes) -> None:
        self.call(lambda: self._publish(payload))

    def publish_raw(self, frames: list[bytes]) -> None:
        self.call(lambda: self._pub.send_multipart(frames))

    def restart_in_place(self) -> None:
        """Number from 0 again, over the same connections."""

        def restart() -> None:
            self.incarnation += 1
            self.batches = []
            self._buffer.clear()

        self.call(restart)

    def roll_over(self, keep: int) -> None:
        def roll_over() -> None:
            while len(self._buffer) > keep:
                self._buffer.popleft()

        self.call(roll_over)

    def call(self, command: Callable[[], object]) -> None:
        assert self.begin(command).wait(30), "the publisher lives"

    def begin(self, command: Callable[[], object]) -> threading.Event:
        """Set when the command is done."""
        done = threading.Event()
        self._commands.put((command, done))
        return done

    def kill(self) -> None:
        self._commands.put(None)
        self._thread.join(10)
        assert not self._thread.is_alive(), "the publisher ends"

    # -- its thread

    def _run(self) -> None:
        context = zmq.Context()
        self._pub = context.socket(zmq.PUB)
        self._router = context.socket(zmq.ROUTER)
        try:
            self._pub.set(zmq.SNDHWM, 100_000)
            self._router.set(zmq.SNDHWM, 100_000)
            port, replay_port = self._wanted
            if self._connect_to is not None:
                self._pub.connect(self._connect_to)
            else:
                self.port = _bind(self._pub, port)
            if self._replay:
                self.replay_port = _bind(self._router, replay_port)
        except zmq.ZMQError as error:
            self._failure = error
            self._close(context)
            return
        finally:
            self._ready.set()
        try:
            while True:
                try:
                    command = self._commands.get(timeout=0.002)
                except queue.Empty:
                    self._serve_replays()
                    continue
                if command is None:
                    return
                command[0]()
                command[1].set()
        finally:
            self._close(context)

    def _close(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._pub.close(0)
        self._router.close(0)
        context.term()

    def _publish(self, payload: bytes | None = None) -> None:
        seq = len(self.batches)
        if payload is None:
            payload = payload_of(seq, self.incarnation)
        self.batches.append(payload)
        frames = [self._topic, seq.to_bytes(8, "big"), payload]
        if not self.faults.drop_live:
            for _ in range(2 if self.faults.double_live else 1):
                self._pub.send_multipart(frames)
        self._buffer.append((seq, payload))

    def _serve_replays(self) -> None:
        while self._replay and self._router.poll(0):
            identity, empty, start = self._router.recv_multipart()
            assert empty == b"", "a replay request has an empty frame in front"
            if not self.faults.serve_replays:
                continue
            self.replays_served += 1
            topic = [b""] if self._topic_in_replies else []
            wanted = [item for item in self._buffer if item[0] >= int.from_bytes(start, "big")]
            for seq, payload in wanted[: self.faults.replies_max]:
                reply = [identity, b"", *([self._topic] if topic else []), seq.to_bytes(8, "big"), payload]
                self._router.send_multipart(reply)
            if self.faults.replies_max is None or len(wanted) < self.faults.replies_max:
                self._router.send_multipart([identity, b"", *topic, END, b""])


def _bind(socket: zmq.Socket[bytes], port: int | None) -> int:
    if port is None:
        return int(socket.bind_to_random_port("tcp://127.0.0.1"))
    socket.bind(f"tcp://127.0.0.1:{port}")
    return port
