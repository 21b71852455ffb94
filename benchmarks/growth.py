"""How costs grow: with the blocks of the index, with the pods that hold a block, with the blocks of a query.

    python -m benchmarks.growth [--blocks-max 10000000] [--pods-max 1024] [--query-max 4000] [--peer]

Each point is measured in a process of its own, after its answers were checked, as the median of single calls in random
order. Beside each stands the floor: the time to hash the query's bytes, and the time that as many cache misses as it has
blocks take in a table of the index's size, fetched ahead (benchmarks/cache_misses.cpp). At the end of each table stands
the line that fits its points best, by least squares. `--peer` asks Dynamo's RadixTree the same (pip install --group
bench-peers), where its tree stays below `PEER_PAIRS_MAX` pairs of a block and a pod.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import dataclasses
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from app import _native
from app.index.prefix_index import IndexLimits, PrefixIndex
from benchmarks.dynamo_peer import add_peer_option
from benchmarks.measure import Goal, print_line, print_machine, resident_bytes, time_calls

BLOCK_SIZE = 16
FLEET = 64
CALLS = 1_000
PEER_PAIRS_MAX = 9_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """`chains` prompts of `length` blocks, each on `holders` of `pods` pods; a query is the first `asked` blocks."""

    chains: int
    length: int
    pods: int
    holders: int
    asked: int

    def tokens(self, chain: int) -> bytes:
        return random.Random(chain).randbytes(self.length * BLOCK_SIZE * 4)

    def hashes(self, chain: int) -> bytes:
        return random.Random(f"engine/{chain}").randbytes(self.length * 8)

    def pods_of(self, chain: int) -> list[int]:
        return [(chain + step) % self.pods for step in range(self.holders)]

    def queries(self) -> list[bytes]:
        chains = random.Random(1).choices(range(self.chains), k=CALLS)
        return [self.tokens(chain)[: self.asked * BLOCK_SIZE * 4] for chain in chains]


class Point(msgspec.Struct, frozen=True):
    """Microseconds a call, and bytes a block."""

    match_us: float
    miss_us: float
    store_us: float  # as many new blocks as a query has
    hash_us: float
    bytes_each: float


def measure(work: Work) -> Point:
    before = resident_bytes()
    index = PrefixIndex(IndexLimits(prefixes_per_context_max=4 * work.chains * work.length + 4_000_000))
    context = index.context("bench", None, BLOCK_SIZE, 0)
    sources = [index.add_source() for _ in range(work.pods)]

    def store(source: int, hashes: bytes, tokens: bytes) -> None:
        index.store(
            source, context, tier=0, group=0, engine_hashes=hashes, parent=None, token_ids=tokens,
            extra_keys=None, now=0,
        )  # fmt: skip

    for chain in range(work.chains):
        hashes, tokens = work.hashes(chain), work.tokens(chain)
        for pod in work.pods_of(chain):
            store(sources[pod], hashes, tokens)
    grown = resident_bytes() - before
    for chain in range(min(work.chains, 20)):
        rows = index.match_tokens(context, work.tokens(chain)[: work.asked * BLOCK_SIZE * 4], None, 1)
        depths = {row.source: row.tiers[0] for row in rows}
        assert depths == {sources[pod]: work.asked for pod in work.pods_of(chain)}, depths
    queries = work.queries()
    core = index._core
    match = time_calls(lambda query: core.match_tokens(context, query, None, 1), queries)
    strangers = [random.Random(f"stranger/{n}").randbytes(len(queries[0])) for n in range(200)]
    assert not core.match_tokens(context, strangers[0], None, 1), "a stranger is not found"
    miss = time_calls(lambda query: core.match_tokens(context, query, None, 1), strangers)
    new = [random.Random(f"new/{n}").randbytes(work.asked * BLOCK_SIZE * 4) for n in range(200)]
    named = [(random.Random(f"name/{n}").randbytes(work.asked * 8), tokens) for n, tokens in enumerate(new)]
    stored = time_calls(lambda pair: store(sources[0], *pair), named)
    hashing = time_calls(lambda query: _native.prefix_hashes(7, BLOCK_SIZE, query, None), queries[:200])
    return Point(
        match.median_us,
        miss.median_us,
        stored.median_us,
        hashing.median_us,
        grown / work.chains / work.length,
    )


def measure_peer(work: Work) -> Point:
    from dynamo.llm import RadixTree, compute_block_hash_for_seq

    def numbers(packed: bytes, kind: str) -> list[int]:
        return array.array(kind, packed).tolist()

    before = resident_bytes()
    tree = RadixTree()
    sent = 0

    def event(hashes: bytes, tokens: bytes) -> bytes:
        local = compute_block_hash_for_seq(numbers(tokens, "I"), BLOCK_SIZE)
        blocks = [
            {"block_hash": name, "tokens_hash": content}
            for name, content in zip(numbers(hashes, "Q"), local, strict=True)
        ]
        stored = {"stored": {"parent_hash": None, "blocks": blocks}}
        return json.dumps({"event_id": sent, "data": stored, "dp_rank": 0}).encode()

    for chain in range(work.chains):
        body = event(work.hashes(chain), work.tokens(chain))
        for pod in work.pods_of(chain):
            sent += 1
            tree.apply_event(pod, body)
    grown = resident_bytes() - before

    def ask(prompt: list[int]) -> Any:
        return tree.find_matches(compute_block_hash_for_seq(prompt, BLOCK_SIZE), False).scores

    for chain in range(min(work.chains, 20)):
        prompt = numbers(work.tokens(chain)[: work.asked * BLOCK_SIZE * 4], "I")
        assert ask(prompt) == {(pod, 0): work.asked for pod in work.pods_of(chain)}
    queries = [numbers(query, "I") for query in work.queries()[: CALLS // 2]]
    strangers = [
        numbers(random.Random(f"stranger/{n}").randbytes(4 * len(queries[0])), "I") for n in range(100)
    ]
    bodies = [
        event(
            random.Random(f"name/{n}").randbytes(work.asked * 8),
            random.Random(f"new/{n}").randbytes(work.asked * BLOCK_SIZE * 4),
        )
        for n in range(100)
    ]
    return Point(
        time_calls(ask, queries).median_us,
        time_calls(ask, strangers).median_us,
        time_calls(lambda body: tree.apply_event(0, body), bodies).median_us,
        time_calls(lambda query: compute_block_hash_for_seq(query, BLOCK_SIZE), queries[:100]).median_us,
        grown / work.chains / work.length,
    )


# -- one point, in a process of its own, so that none finds the heap of another


def in_process(work: Work, whose: str) -> Point | None:
    """None where the peer would not fit."""
    if whose == "peer" and work.chains * work.length * work.holders > PEER_PAIRS_MAX:
        return None
    command = [
        sys.executable,
        "-m",
        "benchmarks.growth",
        "--point",
        whose,
        json.dumps(dataclasses.astuple(work)),
    ]
    done = subprocess.run(command, capture_output=True, check=True)
    return msgspec.json.decode(done.stdout, type=Point)


class Memory:
    """Nanoseconds a random load, by the size of what is loaded from."""

    def __init__(self, folder: Path) -> None:
        self._program = folder / "cache_misses"
        source = Path(__file__).with_name("cache_misses.cpp")
        compiler = shutil.which("c++")
        assert compiler is not None, "a C++ compiler is needed, as it is to build the core"
        subprocess.run([compiler, "-O2", "-std=c++20", "-o", str(self._program), str(source)], check=True)

    def ahead_ns(self, size: int) -> float:
        done = subprocess.run([str(self._program), str(size)], capture_output=True, check=True, text=True)
        return float(done.stdout.split()[1])


# -- tables


def print_table(
    title: str,
    points: list[tuple[int, Work]],
    memory: Memory,
    peer: bool,
    axis: Callable[[int], float],
    unit: str,
) -> dict[int, Point]:
    """Ours, by what grows."""
    print(f"\n{title}\n")
    peers = " Dynamo: match | miss | store | memory |" if peer else ""
    print(f"| {unit} | match | total miss | store, new | memory | floor: hashes | + misses |{peers}")
    print("|---" * (7 + 4 * peer) + "|", flush=True)
    ours: list[tuple[float, Point]] = []
    theirs: list[tuple[float, Point]] = []
    for value, work in points:
        point = in_process(work, "ours")
        assert point is not None
        ours.append((axis(value), point))
        size = int(point.bytes_each * work.chains * work.length)
        misses_us = work.asked * memory.ahead_ns(max(size, 1 << 16)) / 1e3
        line = (
            f"| {value:,} | {point.match_us:.1f} us | {point.miss_us:.2f} us | {point.store_us:.1f} us | "
            f"{point.bytes_each:.0f} B | {point.hash_us:.1f} us | {point.hash_us + misses_us:.1f} us |"
        )
        if peer:
            other = in_process(work, "peer")
            if other is None:
                line += " - | - | - | - |"
            else:
                theirs.append((axis(value), other))
                line += f" {other.match_us:.1f} us | {other.miss_us:.1f} us |"
                line += f" {other.store_us:.0f} us | {other.bytes_each:.0f} B |"
        print(line, flush=True)
    print()
    for whose, found in (("ours", ours), ("Dynamo", theirs)):
        if len(found) > 2:
            places = [place for place, _ in found]
            match = statistics.linear_regression(places, [point.match_us for _, point in found])
            store = statistics.linear_regression(places, [point.store_us for _, point in found])
            of = "log10(blocks)" if axis is math.log10 else unit
            print(
                f"{whose}: match = {match.intercept:.2f} + {match.slope:.4f} x {of} us, "
                f"store = {store.intercept:.2f} + {store.slope:.4f} x {of} us"
            )
    return {value: point for (value, _), (_, point) in zip(points, ours, strict=True)}


def print_ratio(name: str, points: dict[int, Point], value: int, base: int, at_most: float) -> None:
    """Of two matches, where both were measured."""
    if value in points and base in points:
        ratio = points[value].match_us / points[base].match_us
        print_line(f"match, {value:,} {name} / {base:,}", f"{ratio:.2f} x", Goal(ratio, at_most, "x"))


def steps(start: int, stop: int, factor: int) -> Iterator[int]:
    while start < stop:
        yield start
        start *= factor
    yield stop


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks-max", type=int, default=10_000_000)
    parser.add_argument("--pods-max", type=int, default=1_024)
    parser.add_argument("--query-max", type=int, default=4_000)
    add_peer_option(parser)
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point is not None:
        whose, work = options.point
        point = (measure if whose == "ours" else measure_peer)(Work(*json.loads(work)))
        sys.stdout.buffer.write(msgspec.json.encode(point))
        return
    print_machine()
    print(f"settings: {vars(options)}, block size {BLOCK_SIZE}, median of {CALLS} calls")
    with contextlib.ExitStack() as stack:
        memory = Memory(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        blocks = print_table(
            "Blocks of the index; 8 of 64 pods hold each, a query has 256.",
            [(n, Work(max(1, n // 256), 256, FLEET, 8, 256)) for n in steps(10_000, options.blocks_max, 10)],
            memory, options.peer, math.log10, "blocks",
        )  # fmt: skip
        print_ratio("blocks", blocks, 10_000_000, 1_000_000, 1.6)
        pods = print_table(
            "Pods, all of which hold each block; 102,400 blocks, a query has 256.",
            [(n, Work(400, 256, n, n, 256)) for n in steps(1, options.pods_max, 8)],
            memory, options.peer, float, "pods",
        )  # fmt: skip
        for wide in (64, 1_024):
            print_ratio("pods", pods, wide, 8, 1.5)
        print_table(
            "Blocks of a query; 8 of 64 pods hold each, the index has 1,024,000.",
            [
                (n, Work(1_024_000 // options.query_max, options.query_max, FLEET, 8, n))
                for n in steps(1, options.query_max, 4)
            ],
            memory, options.peer, float, "blocks",
        )  # fmt: skip


if __name__ == "__main__":
    main()
