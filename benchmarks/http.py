"""The service over HTTP: server CPU time a request, requests a second and latency, beside Dynamo's indexer.

    python -m benchmarks.http [--blocks 1000000] [--rounds 4] [--peer]

One process on one core, wrk on the others. A query is 4,096 tokens, 256 blocks, found on 8 of 64 pods or on all
64, asked for a second each in turns; hundreds of different ones. Every kind of request is checked once for its answer
before it is measured. `--peer` measures `python -m dynamo.indexer` with the same blocks and queries (pip install --group
bench-peers); it takes events from ZMQ only, and listens on every address of the machine.
Figures of one run are comparable with each other; machines are shared and noisy.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec

from app import hashing
from benchmarks import prompts
from benchmarks.dynamo_peer import add_peer_option, measure_peer
from benchmarks.measure import Goal, print_line, print_machine
from benchmarks.processes import Server, free_port, running, split_cores
from benchmarks.prompts import Fleet
from benchmarks.wrk import CONNECTIONS, WIDE, Kind, Load, Wrk, is_installed

JSON = "application/json"
OCTETS = "application/octet-stream"
MSGPACK = "application/msgpack"
# Not a notation that the short way knows by sight: the same request on the framework's way.
JSON_LONG_WAY = "Application/JSON"

ROUND_S = 1.0
BODIES = 256  # different queries of a kind
POSTED = 4_000  # events measured, at most

GOALS_US = {
    "match tokens, JSON": 120,
    "match tokens, octets": 70,
    "match hashes, JSON": 65,
    "match hashes, octets": 65,
    "events, JSON": 160,
    "events, msgpack": 120,
}


def main() -> int:
    options = _options()
    if not is_installed():
        print("wrk is needed (apt install wrk)", file=sys.stderr)
        return 1
    print_machine()
    print(f"settings: {vars(options)}, {CONNECTIONS} connections, bodies {prompts.TOKENS} tokens")
    chains = max(options.blocks // prompts.BLOCKS, 2 * BODIES)
    fleet = Fleet(chains, options.pods, options.holders, wide=64)
    server_core, load_cores = split_cores()
    with tempfile.TemporaryDirectory() as folder:
        wrk = Wrk(Path(folder), load_cores, ROUND_S)
        _measure_floor(wrk, server_core, options.rounds)
        ours = _measure_ours(wrk, server_core, fleet, options.rounds)
        if options.peer:
            theirs = measure_peer(wrk, server_core, fleet, options.rounds)
            for name, load in theirs.items():
                times = load.cpu_us / ours[name].cpu_us
                print_line(f"  {name}: peer / ours", f"{times:.2f} x CPU", Goal(times, 1, "x", at_least=True))
    for name in GOALS_US:
        if (wide := ours.get(name + WIDE)) is not None:
            ratio = wide.cpu_us / ours[name].cpu_us
            print_line(f"{name}: 64 pods / 8", f"{ratio:.2f} x CPU", Goal(ratio, 1.2, "x"))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--pods", type=int, default=64, help="pods in all")
    parser.add_argument("--holders", type=int, default=8, help="pods that hold each block")
    parser.add_argument("--rounds", type=int, default=4, help="of a second for each kind of query")
    add_peer_option(parser)
    return parser.parse_args()


def _print_load(name: str, load: Load) -> None:
    goal_us = GOALS_US.get(name)
    print_line(name, load, None if goal_us is None else Goal(load.cpu_us, goal_us, "us"))


def _measure_floor(wrk: Wrk, core: set[int] | None, rounds: int) -> None:
    port = free_port()
    query = _json(model="m", token_ids=prompts.token_ids(0))
    command = [sys.executable, "-m", "benchmarks.bare_server", str(port), "2000"]
    with running(command, port, core) as server:
        large, small = wrk.drive_in_turns(
            server, ("25 kB", "/", JSON, [query]), ("2 kB", "/", JSON, [query[:2_048]]), rounds
        )
        print_line("floor: uvicorn alone, 25 kB in, 2 kB out", large)
        print_line("floor: uvicorn alone, 2 kB in, 2 kB out", small)


def _measure_ours(wrk: Wrk, core: set[int] | None, fleet: Fleet, rounds: int) -> dict[str, Load]:
    port = free_port()
    command = [sys.executable, "-m", "app", "serve", "--port", str(port), "--log-level", "error"]
    with running(command, port, core) as server:
        _load(server, fleet)
        narrow = list(fleet.narrow_chains)[:: max(1, len(fleet.narrow_chains) // BODIES)][:BODIES]
        before = server.cpu_s()
        time.sleep(2.0)
        print_line(
            "idle (timers and sweeping)", f"{(server.cpu_s() - before) / 2.0 * 1e3:7.1f} ms CPU a second"
        )
        seen: dict[str, Load] = {}
        for kinds in zip(_queries(narrow), _queries(range(fleet.wide)), strict=True):
            for (_, path, content_type, bodies), chain in zip(kinds, (narrow[0], 0), strict=True):
                _check_match(server.connect(), path, content_type, bodies[0], fleet.pods_of(chain))
            name = kinds[0][0]
            seen[name], seen[name + WIDE] = wrk.drive_in_turns(server, *kinds, rounds)
            _print_load(name, seen[name])
            _print_load(name + WIDE, seen[name + WIDE])
        for name, path, content_type, bodies in _events(fleet.chains):
            _check_event(server.connect(), path, content_type, bodies[0])
            seen[name] = wrk.drive(server, path, bodies[1:], content_type, once=True)
            _print_load(name, seen[name])
        return seen


def _queries(chains: Sequence[int]) -> Iterable[Kind]:
    tokens = [prompts.token_ids(chain) for chain in chains]
    packed = [prompts.packed(one) for one in tokens]
    hashes = [hashing.prefix_hashes("m", None, prompts.BLOCK_SIZE, one, None) for one in packed]
    bodies = [_json(model="m", token_ids=one) for one in tokens]
    yield "match tokens, JSON", "/v1/match", JSON, bodies
    yield "  the same on the long way", "/v1/match", JSON_LONG_WAY, bodies
    yield "match tokens, octets", "/v1/match?model=m", OCTETS, packed
    listed = [memoryview(one).cast("Q").tolist() for one in hashes]
    yield "match hashes, JSON", "/v1/match", JSON, [_json(model="m", prefix_hashes=one) for one in listed]
    yield "match hashes, octets", "/v1/match?model=m&hashes=true", OCTETS, hashes


def _events(first_chain: int) -> Iterable[Kind]:
    """Blocks that nobody has stored yet."""
    chains = range(first_chain, first_chain + POSTED)
    bodies = [_json(pod="pod-0", events=[_event(chain)]) for chain in chains]
    yield "events, JSON", "/v1/events", JSON, bodies
    chains = range(first_chain + POSTED, first_chain + 2 * POSTED)
    payloads = [msgspec.msgpack.encode([time.time(), [_event(chain)], 0]) for chain in chains]
    yield "events, msgpack", "/v1/events?pod=pod-0&model=m", MSGPACK, payloads


def _event(chain: int) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": prompts.engine_hashes(chain),
        "parent_block_hash": None,
        "token_ids": prompts.token_ids(chain),
        "block_size": prompts.BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def _load(server: Server, fleet: Fleet) -> None:
    connection = server.connect()
    began, cpu_s, posts = time.monotonic(), server.cpu_s(), 0
    for chain in range(fleet.chains):
        payload = msgspec.msgpack.encode([time.time(), [_event(chain)], 0])
        for pod in fleet.pods_of(chain):
            answer = _post(connection, f"/v1/events?pod=pod-{pod}&model=m", MSGPACK, payload)
            assert answer["stored_blocks"] == prompts.BLOCKS, answer
            posts += 1
    cpu_us = (server.cpu_s() - cpu_s) / posts * 1e6
    print_line(
        f"loaded {fleet.chains * prompts.BLOCKS} blocks, {posts} events",
        f"{cpu_us:7.1f} us CPU an event (msgpack), {time.monotonic() - began:.0f} s",
    )


def _check_match(connection: HTTPConnection, path: str, kind: str, body: bytes, pods: list[int]) -> None:
    answer = _post(connection, path, kind, body)
    depths = {row["pod"]: row["matched_blocks"] for row in answer["matches"]}
    assert depths == {f"pod-{pod}": prompts.BLOCKS for pod in pods}, depths


def _check_event(connection: HTTPConnection, path: str, kind: str, body: bytes) -> None:
    answer = _post(connection, path, kind, body)
    assert (answer["accepted"], answer["stored_blocks"]) == (1, prompts.BLOCKS), answer


def _post(connection: HTTPConnection, path: str, content_type: str, body: bytes) -> Any:
    connection.request("POST", path, body, {"Content-Type": content_type})
    response = connection.getresponse()
    text = response.read()
    assert response.status == 200, f"{path}: {response.status} {text[:500]!r}"
    return json.loads(text)


def _json(**fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


if __name__ == "__main__":
    sys.exit(main())
