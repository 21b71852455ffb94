"""What a second replica brings: one and two processes, each on a core of its own and each fed by ZMQ.

    python -m benchmarks.replicas [--replicas 2] [--seconds 4]

All replicas follow the same publishers and so hold the same picture, which is checked by their digests and by the
answers. Then one wrk a replica asks each of them at the same time; a balancer in between would only cost. Ingest does not
scale: every replica applies every batch, and its CPU is printed. Needs wrk, and more than `--replicas` cores.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from app import hashing
from benchmarks import prompts
from benchmarks.measure import print_line, print_machine
from benchmarks.processes import Server, free_port, running
from benchmarks.wrk import Load, Wrk, is_installed
from benchmarks.zmq_publisher import Publisher, publishing, tokens_of

PODS = 8
MESSAGES = 2_000
BODIES = 256
OCTETS = "application/octet-stream"
JSON = "application/json"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if not is_installed() or len(cores) <= options.replicas:
        print("wrk is needed (apt install wrk), and more cores than replicas", file=sys.stderr)
        return 1
    print_machine()
    print(f"settings: {vars(options)}, {MESSAGES} batches of {prompts.BLOCKS} blocks from {PODS} pods")
    alone: dict[str, float] = {}
    server_cores, load_cores = cores[-options.replicas :], set(cores[: -options.replicas])
    os.sched_setaffinity(0, load_cores)
    for count in (1, options.replicas):
        for name, loads in _measure(server_cores[:count], load_cores, options.seconds).items():
            rate = sum(load.requests / load.seconds for load in loads)
            cpu_us = sum(load.cpu_us for load in loads) / count
            alone.setdefault(name, rate)
            print_line(
                f"{count} replicas: {name}",
                f"{rate:8.0f} req/s   {cpu_us:6.1f} us CPU a request   {rate / alone[name]:5.2f} x one",
            )
    return 0


def _measure(server_cores: list[int], load_cores: set[int], seconds: float) -> dict[str, list[Load]]:
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(publishing(PODS, prompts.BLOCKS, subscribers=len(server_cores)))
        os.environ["KVINDEXER_PODS"] = ";".join(
            f"pod-{n}=tcp://127.0.0.1:{port},model=m" for n, port in enumerate(publisher.ports)
        )
        servers = []
        for core in server_cores:
            port = free_port()
            command = [sys.executable, "-m", "app", "serve", "--port", str(port), "--log-level", "error"]
            servers.append(stack.enter_context(running(command, port, {core})))
        _feed(servers, publisher)
        wrks = [
            Wrk(Path(stack.enter_context(tempfile.TemporaryDirectory())), load_cores, seconds)
            for _ in servers
        ]
        tokens = [
            tokens_of(message, prompts.BLOCKS) for message in range(0, MESSAGES, max(1, MESSAGES // BODIES))
        ]
        packed = [prompts.packed(one) for one in tokens]
        hashes = [hashing.prefix_hashes("m", None, prompts.BLOCK_SIZE, one, None) for one in packed]
        texts = [
            json.dumps({"model": "m", "token_ids": one}, separators=(",", ":")).encode() for one in tokens
        ]
        kinds = {
            "match tokens, JSON": ("/v1/match", JSON, texts),
            "match tokens, octets": ("/v1/match?model=m", OCTETS, packed),
            "match hashes, octets": ("/v1/match?model=m&hashes=true", OCTETS, hashes),
        }
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(len(servers)))
        found: dict[str, list[Load]] = {}
        for name, (path, kind, bodies) in kinds.items():
            answers = {_answer(server, path, kind, bodies[1]) for server in servers}
            assert len(answers) == 1, "replicas agree"
            assert answers.pop() == _expected(1, tokens), name
            running_loads = [
                pool.submit(wrk.drive, server, path, bodies, kind)
                for wrk, server in zip(wrks, servers, strict=True)
            ]
            found[name] = [load.result() for load in running_loads]
        return found


def _expected(body: int, tokens: list[list[int]]) -> tuple[tuple[str, int], ...]:
    message = body * max(1, MESSAGES // BODIES)
    assert tokens_of(message, prompts.BLOCKS) == tokens[body]
    return ((f"pod-{message % PODS}", prompts.BLOCKS),)


def _answer(server: Server, path: str, kind: str, body: bytes) -> tuple[tuple[str, int], ...]:
    connection = server.connect()
    connection.request("POST", path, body, {"Content-Type": kind})
    rows = json.loads(connection.getresponse().read())["matches"]
    return tuple((row["pod"], row["matched_blocks"]) for row in rows)


def _feed(servers: list[Server], publisher: Publisher) -> None:
    """Every batch to every replica; each is then the same."""
    publisher.wait_for_subscribers()
    cpu_s = [server.cpu_s() for server in servers]
    publisher.start(MESSAGES, 0)
    publisher.done()
    digests = set()
    for server in servers:
        deadline = time.monotonic() + 60
        while (stats := _stats(server))["totals"]["batches"] < MESSAGES:
            assert time.monotonic() < deadline, "a replica does not keep up"
            time.sleep(0.05)
        assert stats["totals"]["gaps"] == 0, "no batch was lost"
        digests.add(stats["digest"])
    assert len(digests) == 1, "replicas hold the same"
    for number, (server, before) in enumerate(zip(servers, cpu_s, strict=True)):
        print_line(
            f"  replica {number + 1} of {len(servers)}: a batch of {prompts.BLOCKS} blocks",
            f"{(server.cpu_s() - before) / MESSAGES * 1e6:8.1f} us CPU",
        )


def _stats(server: Server) -> dict[str, Any]:
    connection = server.connect()
    connection.request("GET", "/v1/stats")
    stats: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return stats


if __name__ == "__main__":
    sys.exit(main())
