"""What replication costs, and how fast it heals: ingest throughput and match latency of a lone process and of three
replicas over one redis-server, in one run; then kill -9 of the replica that holds the most leases, under load.

    python -m benchmarks.replication [--blocks 1000000]        # needs redis-server

Eight engines publish over ZMQ, each with a replay endpoint. A third of the blocks goes to the lone process, the same
third to the replicas, and the rest to the replicas with the kill in its middle. Exact means: every replica that is left
has the digest of a service that was fed with the same batches in this process, all sources are live, and no block is
counted twice. All processes share this machine's cores with the engines and the load.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from app.config import Settings
from app.index.prefix_index import PrefixIndex
from app.ingest.vllm import decode_batch
from app.pods import PodSpec
from app.service import IndexerService, index_limits
from benchmarks.measure import print_line, print_machine
from benchmarks.processes import Server, free_port, running
from tests.ingest.publisher import Publisher

SOURCES = 8
BLOCKS_PER_BATCH = 128
BLOCK_SIZE = 16
BATCHES_PER_TURN = 4  # of each source, before the next source has its turn
DEADLINE_S = 300.0
LOAD_S = 6.0  # at least, of the load with the kill in its middle


class Engines:
    """Eight publishers, and the picture that their batches make."""

    def __init__(self) -> None:
        self._random = random.Random(1)
        self.publishers = {f"pod-{n}": Publisher(buffer_batches=1_000_000) for n in range(SOURCES)}
        self.prompts: list[list[int]] = []
        settings = Settings(prefixes_per_context_max=100_000_000, ttl_s=0)
        self._service = IndexerService(settings, PrefixIndex(index_limits(settings)), clock=time.monotonic)
        self._fed = dict.fromkeys(self.publishers, 0)
        for name in self.publishers:
            self._service.register(PodSpec(name, "m"))

    def make(self, blocks: int) -> list[dict[str, list[bytes]]]:
        """Turns of encoded batches, made before the clock runs."""
        per_turn = SOURCES * BLOCKS_PER_BATCH * BATCHES_PER_TURN
        return [
            {name: [self._batch() for _ in range(BATCHES_PER_TURN)] for name in self.publishers}
            for _ in range(blocks // per_turn)
        ]

    def _batch(self) -> bytes:
        tokens = list(struct.unpack(f"<{BLOCKS_PER_BATCH * BLOCK_SIZE}H", self._random.randbytes(4096)))
        if len(self.prompts) < 1_000:
            self.prompts.append(tokens)
        stored = {
            "type": "BlockStored",
            "block_hashes": [self._random.getrandbits(63) for _ in range(BLOCKS_PER_BATCH)],
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": BLOCK_SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        return msgspec.msgpack.encode([time.time(), [stored], 0])

    def publish(self, turn: dict[str, list[bytes]]) -> None:
        for name, payloads in turn.items():
            for payload in payloads:
                self.publishers[name].publish_payload(payload)

    def digest(self) -> str:
        for name, publisher in self.publishers.items():
            for seq in range(self._fed[name], len(publisher.batches)):
                self._service.apply(name, 0, decode_batch(publisher.batches[seq]), seq=seq)
            self._fed[name] = len(publisher.batches)
        return str(self._service.stats()["digest"])

    def options(self) -> list[str]:
        return [
            option
            for name, publisher in self.publishers.items()
            for option in (
                "--pod",
                f"{name}=tcp://127.0.0.1:{publisher.port},model=m,"
                f"replay=tcp://127.0.0.1:{publisher.replay_port}",
            )
        ]


class Matching:
    """One client that asks without a pause; the latencies of each stretch."""

    def __init__(self, port: int, prompts: Sequence[list[int]]) -> None:
        self._bodies = [json.dumps({"model": "m", "token_ids": prompt}).encode() for prompt in prompts]
        self._port = port
        self._ended = threading.Event()
        self._seconds: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Matching:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        with contextlib.closing(connection):
            number = 0
            while not self._ended.is_set():
                number += 1
                began_s = time.perf_counter()
                connection.request("POST", "/v1/match", self._bodies[number % len(self._bodies)])
                answer = connection.getresponse()
                answer.read()
                assert answer.status == 200, answer.status
                self._seconds.append(time.perf_counter() - began_s)
                time.sleep(0.002)

    def told(self) -> str:
        seconds = sorted(self._seconds)
        p50, p99 = seconds[len(seconds) // 2], seconds[len(seconds) * 99 // 100]
        return f"{1e3 * p50:.2f} / {1e3 * p99:.2f} ms   {len(seconds)} matches"


def stats(server: Server) -> dict[str, Any]:
    connection = server.connect()
    with contextlib.closing(connection):
        connection.request("GET", "/v1/stats")
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        return found


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"not in {DEADLINE_S:g} s: {what}")
        time.sleep(0.02)


def is_exact(servers: Sequence[Server], digest: str) -> bool:
    found = [stats(server) for server in servers]
    return all(
        one["digest"] == digest
        and one["sources"].get("live") == SOURCES
        and one["index"]["copies"] == 0
        and one["totals"]["gaps"] == 0
        for one in found
    )


@contextlib.contextmanager
def indexers(count: int, options: Sequence[str], *variables: str) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        servers = []
        for _ in range(count):
            port = free_port()
            command = ["env", *variables, sys.executable, "-m", "app", "serve", "--port", str(port)]
            command += ["--ttl-s", "0", *options]
            servers.append(stack.enter_context(running(command, port, None)))
        yield servers


def ingest(servers: Sequence[Server], engines: Engines, turns: list[dict[str, list[bytes]]]) -> None:
    blocks = len(turns) * SOURCES * BATCHES_PER_TURN * BLOCKS_PER_BATCH
    cpu_s = [server.cpu_s() for server in servers]
    name = "replicas" if len(servers) > 1 else "alone"
    with Matching(servers[-1].port, engines.prompts) as matching:
        began_s = time.monotonic()
        for turn in turns:
            engines.publish(turn)
        published_s = time.monotonic() - began_s
        digest = engines.digest()
        until(lambda: is_exact(servers, digest), f"{name} exact")
        seconds = time.monotonic() - began_s
    spent = [server.cpu_s() - before for server, before in zip(servers, cpu_s, strict=True)]
    print_line(f"{name}: {blocks} blocks published, then exact", f"{published_s:.1f} s, {seconds:.1f} s")
    print_line(f"{name}: blocks a second until exact everywhere", f"{blocks / seconds:.0f}")
    print_line(f"{name}: CPU a block, of each", ", ".join(f"{1e6 * s / blocks:.1f} us" for s in spent))
    print_line(f"{name}: match p50 / p99 meanwhile", matching.told())


def kill(servers: list[Server], engines: Engines, turns: list[dict[str, list[bytes]]]) -> None:
    held = [len(stats(server)["replication"]["leases"]) for server in servers]
    victim = servers[held.index(max(held))]
    left = [server for server in servers if server is not victim]
    killed_s = 0.0
    with Matching(left[0].port, engines.prompts) as matching:
        for number, turn in enumerate(turns):
            engines.publish(turn)
            time.sleep(LOAD_S / len(turns))
            if number == len(turns) // 2:
                victim.process.kill()
                killed_s = time.monotonic()
        published_s = time.monotonic()
        digest = engines.digest()
        until(lambda: is_exact(left, digest), "exact after the kill")
        exact_s = time.monotonic()
    print_line("kill -9: leases held by it, of 8", max(held))
    print_line("kill -9: the load went on for", f"{published_s - killed_s:.2f} s")
    print_line("kill -9: exact after the kill", f"{exact_s - killed_s:.2f} s")
    print_line("kill -9: exact after the last batch", f"{exact_s - published_s:.2f} s")
    print_line("kill -9: match p50 / p99 of another replica", matching.told())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    blocks = parser.parse_args().blocks
    print_machine()
    engines = Engines()
    first = engines.make(blocks // 3)
    options = engines.options()
    with indexers(1, options) as servers:
        until(lambda: stats(servers[0])["sources"].get("live") == SOURCES, "all sources are live")
        ingest(servers, engines, first)
    for publisher in engines.publishers.values():
        publisher.kill()
    engines = Engines()
    options = engines.options()
    first, more = engines.make(blocks // 3), engines.make(blocks - blocks // 3)
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with (
        running(command, port, None),
        indexers(3, options, f"KVINDEXER_REDIS_URL=redis://127.0.0.1:{port}/0") as servers,
    ):
        until(
            lambda: all(stats(server)["sources"].get("live") == SOURCES for server in servers),
            "all sources are live on every replica",
        )
        ingest(servers, engines, first)
        kill(servers, engines, more)
        print_line("blocks in all", SOURCES * BLOCKS_PER_BATCH * BATCHES_PER_TURN * (len(first) + len(more)))
    for publisher in engines.publishers.values():
        publisher.kill()


if __name__ == "__main__":
    main()
