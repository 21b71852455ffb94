"""What an indexer needs: memory of its process, and CPU time an event and a match, by blocks and by pods.

    python -m benchmarks.sizing [--blocks 100000 1000000 10000000] [--pods 1 8 64]

Each point is a `kvindexer serve` of its own on one core, with the fuzzy index and without. A block is 16 tokens, an
event stores 256 of them and is posted as an engine's msgpack, a match asks for 4,096 random tokens of one chain as raw
tokens. Each block is held by an eighth of the pods, by one at least; a chain's first holder tells new blocks, the
others known ones, and the two are counted apart. CPU is user and system time of the whole process, HTTP included.
Memory is resident, Python and its libraries included (an empty process is the first row). Answers are checked before
they are counted.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Iterable
from http.client import HTTPConnection
from pathlib import Path

import msgspec

from benchmarks.measure import print_machine
from benchmarks.processes import Server, free_port, running, split_cores

BLOCK_SIZE = 16
BLOCKS = 256  # of an event, and of a match
TOKENS = BLOCKS * BLOCK_SIZE
TOKEN_BASE = 65_536  # tokens are this and 16 random bits: msgpack writes each of them in five bytes
MATCHES = 3_000
IDLE_S = 4.0


class Event:
    """The payload of a chain, made by writing its tokens and engine hashes into one that is encoded once."""

    def __init__(self) -> None:
        event = {
            "type": "BlockStored",
            "block_hashes": [2**64 - 1] * BLOCKS,
            "parent_block_hash": None,
            "token_ids": [TOKEN_BASE] * TOKENS,
            "block_size": BLOCK_SIZE,
            "medium": "GPU",
        }
        self._payload = bytearray(msgspec.msgpack.encode([time.time(), [event], 0]))
        token = b"\xce" + TOKEN_BASE.to_bytes(4, "big")
        self._tokens_at = self._payload.index(token * 2)
        self._hashes_at = self._payload.index(b"\xcf" + b"\xff" * 8)

    def of(self, chain: int) -> bytes:
        drawn, names = _token_bits(chain), random.Random(f"names/{chain}").randbytes(8 * BLOCKS)
        payload = self._payload
        for byte in range(2):
            start = self._tokens_at + 3 + byte
            payload[start : start + 5 * TOKENS : 5] = drawn[byte::2]
        for byte in range(8):
            start = self._hashes_at + 1 + byte
            payload[start : start + 9 * BLOCKS : 9] = names[byte::8]
        return bytes(payload)


def _token_bits(chain: int) -> bytes:
    """16 bits a token, big-endian."""
    return random.Random(chain).randbytes(2 * TOKENS)


def prompt(chain: int) -> bytes:
    """The tokens of a chain as little-endian uint32."""
    packed = bytearray(TOKEN_BASE.to_bytes(4, "little") * TOKENS)
    drawn = _token_bits(chain)
    packed[0::4], packed[1::4] = drawn[1::2], drawn[0::2]
    return bytes(packed)


def holders(chain: int, pods: int) -> list[str]:
    return [f"pod-{(chain + step) % pods}" for step in range(max(1, pods // 8))]


def resident_mb(server: Server) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None, "Linux says how much of a process is in memory"
    return int(found[1]) * 1024 / 1e6


def post(connection: HTTPConnection, path: str, content_type: str, body: bytes) -> bytes:
    connection.request("POST", path, body, {"Content-Type": content_type})
    response = connection.getresponse()
    answer = response.read()
    assert response.status == 200, f"{path}: {response.status} {answer[:500]!r}"
    return answer


def tell(server: Server, told: Iterable[tuple[int, str]]) -> float:
    """CPU microseconds of the server an event."""
    connection, event, count, before = server.connect(), Event(), 0, server.cpu_s()
    for chain, pod in told:
        path = f"/v1/events?pod={pod}&model=m"
        answer = json.loads(post(connection, path, "application/msgpack", event.of(chain)))
        assert answer["stored_blocks"] == BLOCKS, answer
        count += 1
    return (server.cpu_s() - before) / count * 1e6 if count else float("nan")


def ask(server: Server, chains: int, pods: int) -> float:
    """CPU microseconds of the server a match."""
    connection, draw, before = server.connect(), random.Random(1), server.cpu_s()
    for _ in range(MATCHES):
        chain = draw.randrange(chains)
        body = prompt(chain)
        answer = json.loads(post(connection, "/v1/match?model=m", "application/octet-stream", body))
        depths = {row["pod"]: row["matched_blocks"] for row in answer["matches"]}
        assert depths == dict.fromkeys(holders(chain, pods), BLOCKS), depths
    return (server.cpu_s() - before) / MATCHES * 1e6


def idle(server: Server) -> float:
    """CPU milliseconds a second when nothing is asked and nothing told."""
    before = server.cpu_s()
    time.sleep(IDLE_S)
    return (server.cpu_s() - before) / IDLE_S * 1e3


def measure(blocks: int, pods: int, fuzzy: bool, core: set[int] | None) -> str:
    chains, port = blocks // BLOCKS, free_port()
    bound = "KVINDEXER_PREFIXES_PER_CONTEXT_MAX"
    environment = [f"{bound}={2 * blocks + 1_000}", f"KVINDEXER_FUZZY={str(fuzzy).lower()}"]
    serve = [sys.executable, "-m", "app", "serve", "--port", str(port), "--log-level", "error"]
    with running(["/usr/bin/env", *environment, *serve], port, core) as server:
        empty_mb = resident_mb(server)
        new = tell(server, ((chain, holders(chain, pods)[0]) for chain in range(chains)))
        known = tell(server, ((chain, pod) for chain in range(chains) for pod in holders(chain, pods)[1:]))
        full_mb = resident_mb(server)
        match = ask(server, chains, pods)
        return (
            f"| {chains * BLOCKS:,} | {pods} | {'on' if fuzzy else 'off'} | {full_mb:,.0f} MB (empty {empty_mb:.0f}) | "
            f"{(full_mb - empty_mb) * 1e6 / chains / BLOCKS:.0f} B | {new:.0f} us | "
            f"{'-' if known != known else f'{known:.0f} us'} | {match:.0f} us | {idle(server):.1f} ms/s |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--pods", type=int, nargs="+", default=[1, 8, 64])
    options = parser.parse_args()
    print_machine()
    print(f"settings: {vars(options)}, block size {BLOCK_SIZE}, {MATCHES} matches")
    core, _ = split_cores()
    print("| blocks | pods | fuzzy | memory | a block | event, new | event, known | match | idle |")
    print("|---|---|---|---|---|---|---|---|---|")
    for blocks in options.blocks:
        for pods in options.pods:
            for fuzzy in (False, True):
                print(measure(blocks, pods, fuzzy, core), flush=True)


if __name__ == "__main__":
    main()
