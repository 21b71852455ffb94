"""Fuzzy match: what it costs, and how much of edited documents it finds.

    python -m benchmarks.fuzzy_match [--blocks 1000000] [--rounds 7]

Every answer is checked before its time is printed: searches against a linear scan over the same SimHashes (its time
stands beside), coverage against a plain table of all contents. Times are CPU time, the best and the median of all
rounds, in one process.

An index is asleep until it is asked, and what it was told of lies in a list; the first question puts that in tables.
Both states are measured, and the step between them. Awake means asked every 16,384 blocks; what these questions put in
the tables counts as storing.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import struct
import time
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence, Set

from app import _native
from app.fuzzy.fuzzy_index import FuzzyIndex, FuzzyLimits, Window
from app.index.prefix_index import IndexLimits, PrefixIndex
from benchmarks.edited_documents import Edits, documents, edit
from benchmarks.measure import Goal, print_line, print_machine, resident_bytes

BLOCK = 16
DISTANCE = 8
CONTEXT = 1
BATCH_BLOCKS = 64
ASKED_EVERY = 16_384  # blocks, of an index that is kept awake


def everything(prefix_hashes: Set[int]) -> Set[int]:
    return prefix_hashes


def rounds_ms(rounds: int, call: Callable[[], object]) -> tuple[float, float]:
    """Best and median."""
    times = []
    for _ in range(rounds):
        begin = time.thread_time()
        call()
        times.append((time.thread_time() - begin) * 1e3)
    return min(times), statistics.median(times)


def random_tokens(count: int, chance: random.Random) -> array[int]:
    return array("I", chance.choices(range(32_000), k=count))


def near_offsets(rows: bytes) -> set[tuple[int, int]]:
    """(offset, distance) of every row of the index."""
    return {(offset, distance) for offset, distance, _, _ in struct.iter_unpack("<IHHQ", rows)}


# -- cost


def measure_cost(blocks: int, rounds: int) -> None:
    chance = random.Random(1)
    tokens = random_tokens(blocks * BLOCK, chance)
    packed = tokens.tobytes()
    hashes = array("Q", (chance.getrandbits(64) | 1 for _ in range(blocks))).tobytes()
    before = resident_bytes()
    index = FuzzyIndex(FuzzyLimits())
    index.add_context(CONTEXT, BLOCK)
    print_stored("asleep", store_all(index, hashes, packed), blocks)
    print_memory("asleep", index, blocks, before)
    wake(index)
    stats = index.stats()
    assert (stats.blocks, stats.backlog, stats.crowded) == (blocks, 0, 0)
    print_memory("awake", index, blocks, before)
    simhashes = b"".join(
        struct.pack("<Q", _native.simhash(packed[i : i + 4 * BLOCK]))
        for i in range(0, len(packed), 4 * BLOCK)
    )
    for name, prompt in prompts(tokens, chance):
        measure_queries(index, name, prompt.tobytes(), simhashes, rounds)
    more = blocks // 10
    more_hashes = array("Q", (chance.getrandbits(64) | 1 for _ in range(more))).tobytes()
    more_packed = random_tokens(more * BLOCK, chance).tobytes()
    print_stored("awake, a tenth more", store_all(index, more_hashes, more_packed), more)
    index.remove(CONTEXT, more_hashes)
    measure_removal("awake", index, hashes)
    asleep, awake = FuzzyIndex(FuzzyLimits()), FuzzyIndex(FuzzyLimits())
    for each in (asleep, awake):
        each.add_context(CONTEXT, BLOCK)
    print_stored("awake, from empty", store_all(awake, hashes, packed, ASKED_EVERY), blocks)
    store_all(asleep, hashes, packed)
    measure_removal("asleep", asleep, hashes)


def print_stored(state: str, calls: Sequence[float], blocks: int) -> None:
    each_ns = sum(calls) / blocks * 1e9
    print_line(
        f"store {state}, batches of {BATCH_BLOCKS}",
        f"{each_ns:.0f} ns a block, the third longest call {sorted(calls)[-3] * 1e3:.2f} ms",
        Goal(each_ns, 150, "ns"),
    )


def print_memory(state: str, index: FuzzyIndex, blocks: int, before: int) -> None:
    each = index.stats().bytes / blocks
    resident = (resident_bytes() - before) / blocks
    print_line(f"memory {state}", f"{each:.1f} B a block, {resident:.1f} more resident", Goal(each, 40, "B"))


def wake(index: FuzzyIndex) -> None:
    """What the first question pays before it is answered, in the slices that a question over HTTP takes."""
    blocks = index.stats().backlog
    slices = put_waiting(index, CONTEXT)
    each_ns = sum(slices) / blocks * 1e9
    print_line("waking", f"{each_ns:.0f} ns a block, {sum(slices) * 1e3:.0f} ms", Goal(each_ns, 100, "ns"))
    longest_ms = max(slices) * 1e3
    print_line("  its slices", f"{len(slices)}, the longest {longest_ms:.2f} ms", Goal(longest_ms, 1, "ms"))


def put_waiting(index: FuzzyIndex, context: int) -> list[float]:
    """What a question does before it is answered: seconds of each slice."""
    slices = []
    offset = 0
    while offset == 0:
        begin = time.thread_time()
        _, offset = index.core.exact(context, bytes(4 * BLOCK), 1, 0, 1)
        slices.append(time.thread_time() - begin)
    return slices


def store_all(index: FuzzyIndex, hashes: bytes, packed: bytes, asked_every: int = 0) -> list[float]:
    """Seconds of each call; of questions too, every so many blocks if any."""
    calls = []
    for begin in range(0, len(hashes) // 8, BATCH_BLOCKS):
        if asked_every and begin % asked_every == 0:
            calls += put_waiting(index, CONTEXT)
        end = begin + BATCH_BLOCKS
        batch, batch_tokens = hashes[8 * begin : 8 * end], packed[4 * BLOCK * begin : 4 * BLOCK * end]
        start = time.thread_time()
        index.store(CONTEXT, batch, batch_tokens)
        calls.append(time.thread_time() - start)
    return calls


def measure_sizes(blocks_max: int) -> None:
    """Bytes a block of an index that is kept awake, at every size from 100,000 blocks: the most in each range."""
    chance = random.Random(4)
    for _ in growing(FuzzyIndex(FuzzyLimits()), ASKED_EVERY, chance):  # what a process takes for a first one
        pass
    before = resident_bytes()
    index = FuzzyIndex(FuzzyLimits())
    print("memory awake, the most bytes a block at any size:")
    first, last = 100_000, 150_000
    most = resident = 0.0
    for blocks in growing(index, blocks_max, chance):
        if blocks < first:
            continue
        most = max(most, index.stats().bytes / blocks)
        resident = max(resident, (resident_bytes() - before) / blocks)
        if blocks >= min(last, blocks_max):
            print_line(
                f"  {first} to {blocks}", f"{most:.2f} B, {resident:.2f} more resident", Goal(most, 40, "B")
            )
            first, last = blocks, blocks * 3 // 2
            most = resident = 0.0


def growing(index: FuzzyIndex, blocks_max: int, chance: random.Random) -> Iterator[int]:
    """Its blocks behind each batch; it is kept awake."""
    index.add_context(CONTEXT, BLOCK)
    for blocks in range(0, blocks_max, BATCH_BLOCKS):
        if blocks % ASKED_EVERY == 0:
            put_waiting(index, CONTEXT)
        index.store(CONTEXT, chance.randbytes(8 * BATCH_BLOCKS), chance.randbytes(4 * BLOCK * BATCH_BLOCKS))
        yield blocks + BATCH_BLOCKS


def prompts(tokens: array[int], chance: random.Random) -> Iterator[tuple[str, array[int]]]:
    """Nothing stored; blocks stored, one token in 25 changed."""
    yield "of other blocks", random_tokens(4_096, chance)
    edited = tokens[BLOCK * 1_000 : BLOCK * 1_000 + 4_096]
    for place in range(0, len(edited), 25):
        edited[place] = chance.randrange(32_000)
    yield "of edited blocks", edited


def measure_queries(index: FuzzyIndex, name: str, prompt: bytes, simhashes: bytes, rounds: int) -> None:
    sliding = array("Q", _native.sliding_simhashes(prompt, BLOCK))
    for mode, step in (("grid", BLOCK), ("sliding", 1)):
        offsets = array("I", range(0, len(sliding), step))
        asked = array("Q", (sliding[offset] for offset in offsets))
        scan_begin = time.thread_time()
        hits = _native.linear_scan(simhashes, asked.tobytes(), DISTANCE)
        scan_ms = (time.thread_time() - scan_begin) * 1e3
        stored = memoryview(simhashes).cast("Q")
        expected = {
            (offsets[query], (asked[query] ^ stored[place]).bit_count())
            for query, place in struct.iter_unpack("<II", hits)
        }
        query = _native.NearQuery(index.core, CONTEXT, prompt, offsets.tobytes(), DISTANCE, 256)
        while not query.step(2**60):
            pass
        rows, done = b"", False
        while not done:
            more, done = query.take(2**60)
            rows += more
        assert near_offsets(rows) == expected, "the index finds what the scan finds"
        ask = index.grid if mode == "grid" else index.sliding
        best, median = rounds_ms(rounds, lambda ask=ask: ask(CONTEXT, prompt, DISTANCE, everything))  # type: ignore[misc]
        print_line(
            f"{mode} {name}, {len(offsets)} windows, {len(expected)} near",
            f"{best:.2f} ms best, {median:.2f} median; linear scan {scan_ms:.0f} ms, {scan_ms / best:.0f} times as long",
            Goal(best, 5 if mode == "grid" else 15, "ms"),
        )
        slices = index.grid_slices if mode == "grid" else index.sliding_slices
        longest = [longest_slice_ms(slices(CONTEXT, prompt, DISTANCE, everything)) for _ in range(rounds)]
        median = statistics.median(ms for ms, _ in longest)
        print_line(
            f"  in {longest[0][1]} slices",
            f"the longest {median:.2f} ms, median of {rounds} rounds; {min(longest)[0]:.2f} at best",
            Goal(median, 1, "ms"),
        )


def measure_removal(state: str, index: FuzzyIndex, hashes: bytes) -> None:
    blocks = len(hashes) // 8 // 4 // BATCH_BLOCKS * BATCH_BLOCKS
    begin = time.thread_time()
    for i in range(0, blocks, BATCH_BLOCKS):
        index.remove(CONTEXT, hashes[8 * i : 8 * (i + BATCH_BLOCKS)])
    removed_s = time.thread_time() - begin
    assert len(index.prefix_hashes(CONTEXT)) == len(hashes) // 8 - blocks
    each_ns = removed_s / blocks * 1e9
    print_line(f"remove {state}, a quarter of all, sweep included", f"{each_ns:.0f} ns a block")


def longest_slice_ms(slices: Generator[None, None, list[Window]]) -> tuple[float, int]:
    """How long others wait at the most, and the number of slices."""
    longest, count = 0.0, 0
    done = False
    while not done:
        begin = time.thread_time()
        try:
            next(slices)
        except StopIteration:
            done = True
        longest = max(longest, time.thread_time() - begin)
        count += 1
    return longest * 1e3, count


# -- what it adds to the prefix index


def measure_events(state: str, blocks: int) -> None:
    """Two prefix indexes side by side, one with a fuzzy index: events of 256 new blocks, in turn; CPU time."""
    limits = IndexLimits(prefixes_per_context_max=4 * blocks)
    contents = FuzzyIndex(FuzzyLimits())
    pair = (PrefixIndex(limits), PrefixIndex(limits, contents))
    places = [(index, index.add_source(), index.context("m", None, BLOCK, 0)) for index in pair]
    events = blocks // 256

    def store_all(numbers: range) -> list[list[float]]:
        spent: list[list[float]] = [[], []]
        for number in numbers:
            hashes, tokens = event(number)
            for which in (0, 1) if number % 2 else (1, 0):
                index, source, context = places[which]
                begin = time.thread_time()
                index.store(
                    source, context, tier=0, group=0, engine_hashes=hashes, parent=None, token_ids=tokens,
                    extra_keys=None, now=0,
                )  # fmt: skip
                spent[which].append(time.thread_time() - begin)
            if state == "awake" and number % (ASKED_EVERY // 256) == 0:
                spent[1][-1] += sum(put_waiting(contents, places[1][2]))
        return spent

    grown = store_all(range(events))
    assert contents.stats().blocks == events * 256
    removed: list[list[float]] = [[], []]
    for number in range(0, events, 4):
        hashes, _ = event(number)
        for which in (0, 1):
            index, source, _context = places[which]
            begin = time.thread_time()
            index.remove(source, tier=0, group=0, engine_hashes=hashes, now=0)
            removed[which].append(time.thread_time() - begin)
    assert len(contents.prefix_hashes(places[1][2])) == sum(256 for n in range(events) if n % 4)
    replaced = store_all(range(events, events + len(removed[0])))
    assert len(contents.prefix_hashes(places[1][2])) == events * 256
    assert contents.stats().asleep == (state == "asleep")
    print(f"events of 256 new blocks, CPU time a block, without a fuzzy index and with one {state}:")
    for label, times in (
        ("store, from empty", grown),
        ("store, the last fifth", [t[-events // 5 :] for t in grown]),
        ("store, in freed room", replaced),
    ):
        without, beside = (sum(t) / len(t) / 256 * 1e9 for t in times)
        print_line(
            f"  {label}",
            f"{without:.0f} ns, {beside:.0f} ns: {beside - without:.0f} more",
            Goal(beside - without, 150, "ns"),
        )
    without, beside = (sum(t) / len(t) / 256 * 1e9 for t in removed)
    print_line("  remove, a quarter", f"{without:.0f} ns, {beside:.0f} ns: {beside - without:.0f} more")


def event(number: int) -> tuple[bytes, bytes]:
    chance = random.Random(number)
    return chance.randbytes(256 * 8), chance.randbytes(256 * BLOCK * 4)


# -- distances


def measure_distances(count: int = 20_000) -> None:
    chance = random.Random(2)
    print(
        f"distance between a block of {BLOCK} random tokens and itself with k tokens changed, {count} each:"
    )
    for changed in range(1, 5):
        distances = []
        for _ in range(count):
            tokens = random_tokens(BLOCK, chance)
            other = array("I", tokens)
            for place in chance.sample(range(BLOCK), changed):
                other[place] = 32_000 + chance.randrange(32_000)
            difference = _native.simhash(tokens.tobytes()) ^ _native.simhash(other.tobytes())
            distances.append(difference.bit_count())
        deciles = statistics.quantiles(distances, n=10)
        within = sum(distance <= DISTANCE for distance in distances) / count
        print(
            f"  k={changed}: mean {statistics.mean(distances):5.2f}, p10 {deciles[0]:.0f}, p50 {deciles[4]:.0f}, "
            f"p90 {deciles[8]:.0f}, within {DISTANCE}: {within:6.1%}"
        )


# -- edited documents


def measure_documents() -> None:
    chance = random.Random(3)
    originals = documents()
    index = FuzzyIndex(FuzzyLimits())
    index.add_context(CONTEXT, BLOCK)
    contents: dict[bytes, int] = {}
    blocks = 0
    for document in originals:
        packed = array("I", document[: len(document) // BLOCK * BLOCK]).tobytes()
        hashes = _native.prefix_hashes(0, BLOCK, packed, None)
        index.store(CONTEXT, hashes, packed)
        for i in range(0, len(packed), 4 * BLOCK):
            content = packed[i : i + 4 * BLOCK]
            contents.setdefault(content, _native.simhash(content))
            blocks += 1
    stats = index.stats()
    print(
        f"edited documents: {len(originals)} documents, {blocks} blocks, {len(contents)} contents, "
        f"{stats.crowded} crowded, {stats.bytes / blocks:.0f} bytes a block"
    )
    print("  share of tokens     prefix  grid exact  sliding exact    near    all | true exact   near    all")
    for label, edits in (
        ("light edits", Edits(0.02, 0.02, 0.02, 0.002)),
        ("middling edits", Edits()),
        ("heavy edits", Edits(0.15, 0.15, 0.15, 0.02)),
    ):
        print_shares(
            label, [edit(document, originals, edits, chance) for document in originals], index, contents
        )


def print_shares(
    label: str, prompts: Sequence[Sequence[int]], index: FuzzyIndex, contents: dict[bytes, int]
) -> None:
    stored = index.prefix_hashes(CONTEXT)
    held = set(stored)
    sums = dict.fromkeys(("prefix", "grid", "exact", "near", "true exact", "true near"), 0)
    tokens = 0
    for prompt in prompts:
        packed = array("I", prompt).tobytes()
        tokens += len(prompt)
        prefixes = array(
            "Q", _native.prefix_hashes(0, BLOCK, packed[: len(prompt) // BLOCK * 4 * BLOCK], None)
        )
        depth = next((i for i, prefix in enumerate(prefixes) if prefix not in held), len(prefixes))
        grid = index.grid(CONTEXT, packed, DISTANCE, everything)
        sliding = index.sliding(CONTEXT, packed, DISTANCE, everything)
        check_exact(sliding, packed, contents)
        exact, near = true_cover(packed, sliding, contents)
        found = {
            "prefix": depth,
            "grid": sum(window.exact for window in grid),
            "exact": sum(window.exact for window in sliding),
            "near": sum(not window.exact for window in sliding),
            "true exact": exact,
            "true near": near,
        }
        assert (found["exact"], found["near"]) == (exact, near), (label, found)
        for name, count in found.items():
            sums[name] += count * BLOCK
    share = {name: count / tokens for name, count in sums.items()}
    print(
        f"  {label:18} {share['prefix']:7.1%} {share['grid']:11.1%} {share['exact']:14.1%} {share['near']:7.1%} "
        f"{share['exact'] + share['near']:6.1%} | {share['true exact']:10.1%} {share['true near']:6.1%} "
        f"{share['true exact'] + share['true near']:6.1%}"
    )


def check_exact(windows: Sequence[Window], packed: bytes, contents: dict[bytes, int]) -> None:
    for window in windows:
        if window.exact:
            begin = 4 * window.token_offset
            assert packed[begin : begin + 4 * BLOCK] in contents, "no reported exact reuse is wrong"


def true_cover(packed: bytes, sliding: Sequence[Window], contents: dict[bytes, int]) -> tuple[int, int]:
    """How many exact windows fit without overlap; and how many near ones beside the exact ones chosen."""
    windows = len(packed) // 4 - BLOCK + 1
    exact = [i for i in range(windows) if packed[4 * i : 4 * (i + BLOCK)] in contents]
    taken = [window.token_offset for window in sliding if window.exact]
    occupied = bytearray(windows + 2 * BLOCK)
    for offset in taken:
        occupied[max(0, offset - BLOCK + 1) : offset + BLOCK] = b"\1" * (
            offset + BLOCK - max(0, offset - BLOCK + 1)
        )
    free = [i for i in range(windows) if not occupied[i]]
    simhashes = array("Q", _native.sliding_simhashes(packed, BLOCK))
    asked = array("Q", (simhashes[i] for i in free))
    hits = _native.linear_scan(array("Q", contents.values()).tobytes(), asked.tobytes(), DISTANCE)
    near = sorted({free[query] for query, _ in struct.iter_unpack("<II", hits)})
    return most_without_overlap(exact), most_without_overlap(near)


def most_without_overlap(offsets: Sequence[int]) -> int:
    count, free = 0, 0
    for offset in offsets:
        if offset >= free:
            count, free = count + 1, offset + BLOCK
    return count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    print_machine()
    print(f"load {os.getloadavg()[0]:.1f}; {arguments.blocks} blocks of {BLOCK} tokens, distance {DISTANCE}")
    measure_cost(arguments.blocks, arguments.rounds)
    measure_sizes(3 * arguments.blocks)
    for state in ("asleep", "awake"):
        measure_events(state, arguments.blocks)
    measure_distances()
    measure_documents()


if __name__ == "__main__":
    main()
