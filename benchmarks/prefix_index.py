"""The index in process: memory a block, match, store, remove, clear and sweep, with every answer checked.

    python -m benchmarks.prefix_index [--blocks 1000000] [--pods 8] [--fleet 64] [--peer]

`--peer` puts the same chains into Dynamo's RadixTree as well (pip install --group bench-peers) and asks it the same:
tokens to hashes to scores, which are two calls there and take Python integers. It comes last: beside a tree of 340 MB the
stores of another index in the process are a tenth to a quarter slower.

A chain is one prompt of 4,096 tokens, 256 blocks of 16. Chains are looked up in random order, so that a match
finds none of its entries in a CPU cache (unless the whole index fits there). The floor beside a match is the hash chain
alone, measured in the same run.
"""

from __future__ import annotations

import argparse
import array
import itertools
import json
import random
import struct

import msgspec

from app import _native
from app.events import BlockStored
from app.index.prefix_index import IndexLimits, PrefixIndex, SweepResult
from app.ingest.vllm import decode_batch
from benchmarks.dynamo_peer import add_peer_option
from benchmarks.measure import (
    Goal,
    Timing,
    print_line,
    print_machine,
    print_timing,
    resident_bytes,
    time_calls,
)

BLOCK_SIZE = 16
CHAIN_BLOCKS = 256
FRESH_CHAINS = 400  # stored and removed again beside the others
ROW = struct.Struct("<6I")
UNNAMED_RECORD_BYTES = (
    16  # of native/block_pool.hpp: the prefix hash, the set of holders, when it was last seen
)


class Workload:
    """Chains that can be made again from their number, so that the index is the only memory that grows."""

    def __init__(self, blocks: int, fleet: int, fresh_chains: int = FRESH_CHAINS) -> None:
        self.chains = blocks // CHAIN_BLOCKS
        self.blocks = self.chains * CHAIN_BLOCKS
        room = self.blocks + fresh_chains * CHAIN_BLOCKS
        self.index = PrefixIndex(IndexLimits(prefixes_per_context_max=room, prefixes_max=room))
        self.context = self.index.context("bench", None, BLOCK_SIZE, 0)
        self.sources = [self.index.add_source() for _ in range(fleet)]

    @staticmethod
    def tokens(chain: int) -> bytes:
        return random.Random(chain).randbytes(CHAIN_BLOCKS * BLOCK_SIZE * 4)

    @staticmethod
    def engine_hashes(chain: int, seed: int = 0) -> bytes:
        return random.Random(f"{seed}/{chain}").randbytes(CHAIN_BLOCKS * 8)

    def holders(self, chain: int, pods: int) -> list[int]:
        return [self.sources[(chain + pod) % len(self.sources)] for pod in range(pods)]

    def store(self, chain: int, source: int, seed: int = 0) -> None:
        self.store_event((source, self.engine_hashes(chain, seed), self.tokens(chain)))

    def store_event(self, event: tuple[int, bytes, bytes]) -> None:
        source, engine_hashes, tokens = event
        self.index.store(
            source,
            self.context,
            tier=0,
            group=0,
            engine_hashes=engine_hashes,
            parent=None,
            token_ids=tokens,
            extra_keys=None,
            now=0,
        )

    def event(self, chain: int, source: int) -> tuple[int, bytes, bytes]:
        return source, self.engine_hashes(chain), self.tokens(chain)

    def check_match(self, chain: int, pods: int) -> None:
        rows = self.index.match_tokens(self.context, self.tokens(chain), None, 1)
        depths = {row.source: row.tiers[0] for row in rows}
        expected = dict.fromkeys(self.holders(chain, pods), CHAIN_BLOCKS)
        assert depths == expected, f"chain {chain}: {depths} is not {expected}"


def measure_peer(work: Workload, pods: int, order: list[int], ours: Timing) -> None:
    """Dynamo's tree over the same blocks: its store is fed JSON, which is the only form that it takes."""
    from dynamo.llm import RadixTree, compute_block_hash_for_seq

    before = resident_bytes()
    tree = RadixTree()
    number = 0
    for chain in range(work.chains):
        tokens = list(struct.unpack(f"<{CHAIN_BLOCKS * BLOCK_SIZE}I", work.tokens(chain)))
        local = compute_block_hash_for_seq(tokens, BLOCK_SIZE)
        engine = struct.unpack(f"<{CHAIN_BLOCKS}Q", work.engine_hashes(chain))
        blocks = [{"block_hash": e, "tokens_hash": t} for e, t in zip(engine, local, strict=True)]
        for source in work.holders(chain, pods):
            stored = {"parent_hash": None, "blocks": blocks}
            event = {"event_id": number, "data": {"stored": stored}, "dp_rank": 0}
            number += 1
            tree.apply_event(source, json.dumps(event).encode())
    grown = (resident_bytes() - before) / (work.chains * CHAIN_BLOCKS)
    print_line(f"Dynamo RadixTree: memory, {pods} pods a block", f"{grown:.1f} B a block")
    prompts = [list(struct.unpack(f"<{CHAIN_BLOCKS * BLOCK_SIZE}I", work.tokens(chain))) for chain in order]

    def ask(prompt: list[int]) -> object:
        return tree.find_matches(compute_block_hash_for_seq(prompt, BLOCK_SIZE), False).scores

    for chain, prompt in zip(order[:50], prompts, strict=False):
        assert ask(prompt) == {(source, 0): CHAIN_BLOCKS for source in work.holders(chain, pods)}
    asked = time_calls(ask, prompts[50:])
    print_line("Dynamo RadixTree: match 4,096 tokens, cold", asked)
    times = asked.median_us / ours.median_us
    print_line("  peer / ours (packed rows)", f"{times:.1f} x CPU", Goal(times, 2, "x", at_least=True))


def measure_memory(options: argparse.Namespace) -> Workload:
    """The chains, held by one pod each and then by the others too."""
    empty = resident_bytes()
    work = Workload(options.blocks, options.fleet)
    for chain in range(work.chains):
        work.store(chain, work.holders(chain, 1)[0])
    grown = (resident_bytes() - empty) / work.blocks
    print_line("memory, 1 pod a block (with engine keys)", f"{grown:.1f} B a block", Goal(grown, 48, "B"))
    for chain in range(work.chains):
        for source in work.holders(chain, options.pods)[1:]:
            work.store(chain, source)
    grown = (resident_bytes() - empty) / work.blocks
    name = f"memory, {options.pods} pods a block (same engine hashes)"
    print_line(name, f"{grown:.1f} B a block", Goal(grown, 48, "B"))
    return work


def measure_matches(work: Workload, pods: int, order: list[int]) -> Timing:
    """Of packed rows."""
    for chain in order[:200]:
        work.check_match(chain, pods)
    index, core, context = work.index, work.index._core, work.context
    prompts = [work.tokens(chain) for chain in order]
    cold = time_calls(lambda prompt: index.match_tokens(context, prompt, None, 2), prompts)
    print_line("match 4,096 tokens, cold", cold)
    packed = time_calls(lambda prompt: core.match_tokens(context, prompt, None, 2), prompts)
    print_timing("  the same, packed rows", packed, 10)
    floor = time_calls(lambda prompt: _native.prefix_hashes(7, BLOCK_SIZE, prompt, None), prompts[:500])
    print_line("  floor: the hash chain alone", floor)
    return packed


def measure_misses(work: Workload) -> None:
    core, context = work.index._core, work.context
    strangers = [random.Random(f"stranger {n}").randbytes(CHAIN_BLOCKS * BLOCK_SIZE * 4) for n in range(500)]
    assert core.match_tokens(context, strangers[0], None, 2) == b"", "a stranger must not match"
    missed = time_calls(lambda prompt: core.match_tokens(context, prompt, None, 2), strangers)
    print_timing("total miss", missed, 1)


def measure_changes(work: Workload) -> None:
    """Chains that come, at three pods, and go again."""
    index, core, context = work.index, work.index._core, work.context
    fresh = [work.event(work.chains + n, work.sources[0]) for n in range(FRESH_CHAINS)]
    print_timing("store 256 new blocks", time_calls(work.store_event, fresh), 20)
    again = [(work.sources[1], hashes, tokens) for _, hashes, tokens in fresh]
    print_timing("store 256 blocks that another pod has", time_calls(work.store_event, again), 15)
    seeded = [
        (work.sources[2], work.engine_hashes(work.chains + n, seed=1), tokens)
        for n, (_, _, tokens) in enumerate(fresh)
    ]
    print_line("  the same, engine hashes of its own", time_calls(work.store_event, seeded))
    rows = core.match_tokens(context, fresh[0][2], None, 2)
    assert {row[:2] for row in ROW.iter_unpack(rows)} == {(s, CHAIN_BLOCKS) for s in work.sources[:3]}

    def remove(event: tuple[int, bytes, bytes]) -> None:
        removed = index.remove(event[0], tier=0, group=0, engine_hashes=event[1], now=3)
        assert removed.removed_blocks == CHAIN_BLOCKS, removed

    print_timing("remove 256 blocks that others have", time_calls(remove, fresh), 20)
    print_line("  the same, engine hashes of its own", time_calls(remove, seeded))
    print_timing("remove 256 blocks that nobody else has", time_calls(remove, again), 20)
    assert core.match_tokens(context, fresh[0][2], None, 3) == b"", "all that was new is gone"


def measure_wire(work: Workload) -> None:
    """Batches as engines send them, decoded and stored."""
    index, source, context = work.index, work.sources[0], work.context
    fresh = [work.event(work.chains + n, source) for n in range(FRESH_CHAINS)]

    def payload(event: tuple[int, bytes, bytes]) -> bytes:
        _, hashes, tokens = event
        stored = {
            "type": "BlockStored",
            "block_hashes": array.array("Q", hashes).tolist(),
            "parent_block_hash": None,
            "token_ids": array.array("I", tokens).tolist(),
            "block_size": BLOCK_SIZE,
            "medium": "GPU",
        }
        return msgspec.msgpack.encode([0.0, [stored], 0])

    def ingest(payload: bytes) -> None:
        (event,) = decode_batch(payload).events
        assert isinstance(event, BlockStored)
        index.store(
            source,
            context,
            tier=event.tier,
            group=event.group,
            engine_hashes=event.block_hashes,
            parent=event.parent_block_hash,
            token_ids=event.token_ids,
            extra_keys=event.extra_keys,
            now=3,
        )

    taken = time_calls(ingest, [payload(event) for event in fresh])
    print_timing("256 new blocks, from msgpack bytes to indexed", taken, 100)
    rows = index.match_tokens(context, fresh[-1][2], None, 3)
    assert {row.source: row.tiers[0] for row in rows} == {source: CHAIN_BLOCKS}
    for _, hashes, _ in fresh:
        index.remove(source, tier=0, group=0, engine_hashes=hashes, now=3)


def measure_clear(work: Workload, pods: int, order: list[int]) -> None:
    """A pod forgets all, and sweeps take the traces away."""
    index, source = work.index, work.sources[0]
    held = index.blocks_by_tier(source)[0]
    print_timing(f"clear a pod of {held} blocks", time_calls(index.clear, [source]), 100)
    assert index.blocks_by_tier(source)[0] == 0
    swept: list[SweepResult] = []
    timings = []
    while not swept or not swept[-1].idle:
        timings.append(time_calls(lambda visits: swept.append(index.sweep(4, visits)), [2_048]))
    visited = sum(one.visited for one in swept)
    print_line("sweep slices of 2,048 entries", f"{slices(timings)}   {visited} entries")
    for chain in order[:50]:
        rows = index.match_tokens(work.context, work.tokens(chain), None, 5)
        expected = {s: CHAIN_BLOCKS for s in work.holders(chain, pods) if s != source}
        assert {row.source: row.tiers[0] for row in rows} == expected


def measure_listing(work: Workload) -> None:
    index = work.index
    before = index.stats()
    timings = [
        time_calls(lambda visits: index.list_all(visits, 5), [4_096]) for _ in range(work.blocks // 4_096 + 2)
    ]
    assert index.list_all(1, 5), "each is found by its hash alone"
    listed = (index.stats().bytes - before.bytes) / before.prefixes
    print_line("listed by hash, slices of 4,096 entries", f"{slices(timings)}   {listed:.1f} B a block more")
    all_of_it = index.stats().bytes / before.prefixes
    print_line("  all of the index then", f"{all_of_it:.1f} B a block", Goal(all_of_it, 48, "B"))
    unnamed = UNNAMED_RECORD_BYTES + listed
    print_line("  of that without engine keys", f"{unnamed:.1f} B a block", Goal(unnamed, 24, "B"))


def measure_full(options: argparse.Namespace) -> None:
    """New chains where the index is full, so that as many blocks go as come."""
    work = Workload(options.blocks, options.fleet, fresh_chains=0)
    for chain in range(work.chains):
        work.store(chain, work.sources[chain % options.fleet])
    assert work.index.stats().evicted == 0
    fresh = [work.event(work.chains + n, work.sources[n % options.fleet]) for n in range(FRESH_CHAINS)]
    print_line("store 256 new blocks in a full index", time_calls(work.store_event, fresh))
    rows = work.index.match_tokens(work.context, fresh[-1][2], None, 0)
    assert [row.tiers[0] for row in rows] == [CHAIN_BLOCKS], "the newest is there"
    stats = work.index.stats()
    assert stats.prefixes <= work.blocks, stats
    assert stats.evicted >= FRESH_CHAINS * CHAIN_BLOCKS, stats


def measure_own_seeds(options: argparse.Namespace) -> None:
    """What further pods take that give the same blocks names of their own."""
    work = Workload(options.blocks, options.fleet)
    grown = []
    for seed in range(3):
        for chain in range(work.chains):
            work.store(chain, work.sources[seed], seed)
        grown.append(resident_bytes())
    rows = work.index.match_tokens(work.context, work.tokens(0), None, 1)
    assert {row.source: row.tiers[0] for row in rows} == dict.fromkeys(work.sources[:3], CHAIN_BLOCKS)
    each = [(after - before) / work.blocks for before, after in itertools.pairwise(grown)]
    told = " and ".join(f"{more:.1f}" for more in each)
    name = "memory, two further pods, engine hashes of their own"
    print_line(name, f"{told} B a block more", Goal(max(each), 28, "B"))


def slices(timings: list[Timing]) -> str:
    """Of single calls."""
    median_us = sorted(timing.median_us for timing in timings)[len(timings) // 2]
    return f"median {median_us:8.2f} us   max {max(timing.max_us for timing in timings):9.2f} us"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--pods", type=int, default=8, help="pods that hold each block")
    parser.add_argument("--fleet", type=int, default=64, help="pods in all")
    add_peer_option(parser)
    options = parser.parse_args()
    print_machine()
    print(f"settings: {options}")
    work = measure_memory(options)
    order = random.Random(1).sample(range(work.chains), min(2_000, work.chains))
    matched = measure_matches(work, options.pods, order)
    measure_misses(work)
    measure_changes(work)
    measure_wire(work)
    measure_clear(work, options.pods, order)
    measure_listing(work)
    measure_full(options)
    if options.fleet >= 3:
        measure_own_seeds(options)
    print(f"index: {work.index.stats()}")
    if options.peer:
        measure_peer(work, options.pods, order, matched)


if __name__ == "__main__":
    main()
