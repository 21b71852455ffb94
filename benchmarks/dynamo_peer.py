"""Dynamo's standalone indexer (`python -m dynamo.indexer`, PyPI `ai-dynamo-runtime`) on the same blocks and queries.

It takes events from ZMQ publishers that register with it, so this publishes as 64 engines would. Its block
hashes are its own; a query by hash has them computed beforehand, as a router would.
"""

from __future__ import annotations

import argparse
import array
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from benchmarks import prompts
from benchmarks.measure import print_line
from benchmarks.processes import Server, free_port, running
from benchmarks.prompts import Fleet
from benchmarks.wrk import WIDE, Kind, Load, Wrk

BODIES = 256
LOADED_WITHIN_S = 180.0
IN_FLIGHT = 256  # events published before the peer is waited for


def dynamo_is_installed() -> bool:
    return (
        importlib.util.find_spec("dynamo") is not None
        and importlib.util.find_spec("dynamo.indexer") is not None
    )


def add_peer_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer", action=_PeerOption, nargs=0, default=False, help="measure Dynamo beside us, in the same run"
    )


class _PeerOption(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: object) -> None:
        if not dynamo_is_installed():
            parser.error("--peer needs Dynamo: pip install --group bench-peers")
        setattr(namespace, self.dest, True)


def measure_peer(wrk: Wrk, core: set[int] | None, fleet: Fleet, rounds: int) -> dict[str, Load]:
    """By the names of our own figures."""
    port = free_port()
    command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
    with running(command, port, core) as server:
        _load(server, fleet)
        narrow = list(fleet.narrow_chains)[:: max(1, len(fleet.narrow_chains) // BODIES)][:BODIES]
        seen: dict[str, Load] = {}
        for kinds in zip(_queries(narrow), _queries(range(fleet.wide)), strict=True):
            for (_, path, _, bodies), chain in zip(kinds, (narrow[0], 0), strict=True):
                _check(server, path, bodies[0], fleet.pods_of(chain))
            name = kinds[0][0]
            seen[name], seen[name + WIDE] = wrk.drive_in_turns(server, *kinds, rounds)
            print_line(f"peer: {name}", seen[name])
            print_line(f"peer: {name}{WIDE}", seen[name + WIDE])
        return seen


def _queries(chains: Sequence[int]) -> list[Kind]:
    hash_of = importlib.import_module("dynamo.llm").compute_block_hash_for_seq
    by_tokens, by_hashes = [], []
    for chain in chains:
        tokens = prompts.token_ids(chain)
        hashes = array.array("q", array.array("Q", hash_of(tokens, prompts.BLOCK_SIZE)).tobytes())
        by_tokens.append(_json(model_name="m", token_ids=tokens))
        by_hashes.append(_json(model_name="m", block_hashes=hashes.tolist()))
    return [
        ("match tokens, JSON", "/query", "application/json", by_tokens),
        ("match hashes, JSON", "/query_by_hash", "application/json", by_hashes),
    ]


def _load(server: Server, fleet: Fleet) -> None:
    context = zmq.Context()
    engines = []
    for pod in range(fleet.pods):
        engine = context.socket(zmq.PUB)
        engine.set(zmq.SNDHWM, 0)
        engine.set(zmq.LINGER, 0)
        endpoint = f"tcp://127.0.0.1:{engine.bind_to_random_port('tcp://127.0.0.1')}"
        said = {"instance_id": pod, "endpoint": endpoint, "model_name": "m", "block_size": prompts.BLOCK_SIZE}
        _post(server, "/register", said)
        engines.append(engine)
    try:
        _publish(server, fleet, engines)
    finally:
        context.destroy(linger=0)


def _publish(server: Server, fleet: Fleet, engines: list[zmq.Socket[bytes]]) -> None:
    _await_subscriptions(server, engines)
    sequence = [1] * fleet.pods
    cpu_s, posts = server.cpu_s(), 0
    for chain in range(fleet.chains):
        event = [
            "BlockStored", prompts.engine_hashes(chain), None, prompts.token_ids(chain),
            prompts.BLOCK_SIZE, None, "GPU",
        ]  # fmt: skip
        payload = msgspec.msgpack.encode([time.time(), [event], 0])
        for pod in fleet.pods_of(chain):
            engines[pod].send_multipart([b"", sequence[pod].to_bytes(8, "big"), payload])
            sequence[pod] += 1
            posts += 1
        if chain % (IN_FLIGHT // fleet.holders) == 0 or chain == fleet.chains - 1:
            _await_chain(server, fleet, chain)
    cpu_us = (server.cpu_s() - cpu_s) / posts * 1e6
    print_line(
        f"peer: loaded {fleet.chains * prompts.BLOCKS} blocks, {posts} events (ZMQ)",
        f"{cpu_us:7.1f} us CPU an event",
    )


def _await_subscriptions(server: Server, engines: list[zmq.Socket[bytes]]) -> None:
    """A subscriber that is not connected yet loses what is published: repeat a clear until all are heard of."""
    probe = list(range(prompts.BLOCK_SIZE))
    event = ["BlockStored", [1], None, probe, prompts.BLOCK_SIZE, None, "GPU"]
    payload = msgspec.msgpack.encode([time.time(), [event], 0])
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for engine in engines:
            engine.send_multipart([b"", bytes(8), payload])
        if len(_scores(server, probe)) == len(engines):
            return
        time.sleep(0.1)
    raise RuntimeError("the peer does not hear its engines")


def _await_chain(server: Server, fleet: Fleet, chain: int) -> None:
    expected = {str(pod) for pod in fleet.pods_of(chain)}
    tokens = prompts.token_ids(chain)
    deadline = time.monotonic() + LOADED_WITHIN_S
    while time.monotonic() < deadline:
        scores = _scores(server, tokens)
        if {pod for pod, ranks in scores.items() if ranks.get("0") == prompts.TOKENS} == expected:
            return
        time.sleep(0.01)
    raise RuntimeError(f"the peer did not load prompt {chain} in time")


def _scores(server: Server, tokens: list[int]) -> dict[str, dict[str, int]]:
    scores: dict[str, dict[str, int]] = _post(server, "/query", {"model_name": "m", "token_ids": tokens})[
        "scores"
    ]
    return scores


def _check(server: Server, path: str, body: bytes, pods: list[int]) -> None:
    scores = _post(server, path, body)["scores"]
    expected = {str(pod): {"0": prompts.TOKENS} for pod in pods}
    assert scores == expected, f"{path}: {scores} is not {expected}"


def _post(server: Server, path: str, body: bytes | dict[str, Any]) -> Any:
    connection = server.connect()
    text = body if isinstance(body, bytes) else _json(**body)
    connection.request("POST", path, text, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    assert response.status < 300, f"{path}: {response.status} {answer[:500]!r}"
    return json.loads(answer)


def _json(**fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()
