"""The publishers of benchmarks.zmq_ingest, in a process of their own: real sockets, one a pod.

    python -m benchmarks.zmq_publisher --pods 8 --blocks 256

Says its ports as a JSON list and then, when all have a subscriber, `"subscribed"`. For each line `messages
messages_per_s` (0: as fast as they go) on its input it publishes, and answers with a JSON object. Message n, counted over
all pods in turn, stores a chain that nobody has stored before: its first token is FIRST_TOKEN + n, its engine hashes are
random. The sockets are XPUB: PUB that tells its owner of subscribers, so that nothing is published to nobody.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from benchmarks import prompts

FIRST_TOKEN = 1_000_000
_TOKEN = b"\xce"
_NAME = b"\xa9token_ids"


def tokens_of(message: int, blocks: int) -> list[int]:
    """The prompt that a message stores."""
    return [FIRST_TOKEN + message, *prompts.token_ids(0)[1 : blocks * prompts.BLOCK_SIZE]]


class Payloads:
    """Payloads made by writing a first token and new hashes into one that is encoded once."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        event = {
            "type": "BlockStored",
            "block_hashes": [2**64 - 1] * blocks,
            "parent_block_hash": None,
            "token_ids": tokens_of(0, blocks),
            "block_size": prompts.BLOCK_SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * blocks,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        self._payload = bytearray(msgspec.msgpack.encode([time.time(), [event], 0]))
        first = _TOKEN + FIRST_TOKEN.to_bytes(4, "big")
        self._token_at = self._payload.index(first, self._payload.index(_NAME)) + 1
        self._hashes_at = self._payload.index(b"\xcf" + b"\xff" * 8)

    def make(self, message: int) -> bytes:
        payload = self._payload
        payload[self._token_at : self._token_at + 4] = (FIRST_TOKEN + message).to_bytes(4, "big")
        names = os.urandom(8 * self._blocks)
        for byte in range(8):
            start = self._hashes_at + 1 + byte
            payload[start : start + 9 * self._blocks : 9] = names[byte::8]
        return bytes(payload)


def publish(
    sockets: list[zmq.Socket[bytes]], payloads: Payloads, first: int, messages: int, per_s: float
) -> dict[str, float]:
    """The longest lag behind the plan tells whether the publisher kept its own rate."""
    began = time.perf_counter()
    lag_s = 0.0
    for n in range(first, first + messages):
        if per_s:
            due = began + (n - first) / per_s
            while (now := time.perf_counter()) < due:
                if due - now > 0.0005:
                    time.sleep(0.0002)
            lag_s = max(lag_s, now - due)
        pod = n % len(sockets)
        seq = n // len(sockets)
        sockets[pod].send_multipart([b"", seq.to_bytes(8, "big"), payloads.make(n)])
    return {"seconds": time.perf_counter() - began, "lag_s": lag_s}


class Publisher:
    """This module as a child process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.ports: list[int] = self._said()

    def wait_for_subscribers(self) -> None:
        assert self._said() == "subscribed"

    def start(self, messages: int, per_s: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{messages} {per_s}\n")
        self._process.stdin.flush()

    def done(self) -> dict[str, float]:
        """When the last start is through."""
        said: dict[str, float] = self._said()
        return said

    def _said(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the publisher ended"
        return json.loads(line)


@contextlib.contextmanager
def publishing(
    pods: int, blocks: int, *, subscribers: int = 1, cores: set[int] | None = None
) -> Iterator[Publisher]:
    """On `cores`, or those of this process."""
    options = {"pods": pods, "blocks": blocks, "subscribers": subscribers}
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.zmq_publisher", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    ) as process:
        if cores is not None:
            os.sched_setaffinity(process.pid, cores)  # it has no other threads yet
        try:
            yield Publisher(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--subscribers", type=int, default=1, help="of each pod, to wait for")
    options = parser.parse_args()
    context = zmq.Context()
    sockets = []
    for _ in range(options.pods):
        socket = context.socket(zmq.XPUB)
        socket.set(zmq.SNDHWM, 0)  # a publisher that drops would measure itself
        socket.set(zmq.XPUB_VERBOSE, 1)  # each subscriber, not only the first
        socket.bind("tcp://127.0.0.1:0")
        sockets.append(socket)
    ports = [int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]) for socket in sockets]
    print(json.dumps(ports), flush=True)
    payloads = Payloads(options.blocks)
    for socket in sockets:
        for _ in range(options.subscribers):
            socket.recv()
    print('"subscribed"', flush=True)
    published = 0
    for line in sys.stdin:
        messages, per_s = line.split()
        done = publish(sockets, payloads, published, int(messages), float(per_s))
        published += int(messages)
        print(json.dumps(done), flush=True)
    context.destroy(0)


if __name__ == "__main__":
    main()
