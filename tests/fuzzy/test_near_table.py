"""The table against looking at everything, with SimHashes laid where a search must work hardest to find them.

In a table of few buckets every bucket is within reach and nothing can be missed; these have up to a million.
"""

import random
import struct
from array import array

import pytest

from app import _native

CHUNKS = ((43, 21), (22, 21), (0, 22))  # lowest bit and width of chunks A, B, C

SCANS = [0, 1, 2, 3]  # what the machine can do, best first


def flip(simhash: int, first: int, width: int, count: int, chance: random.Random) -> int:
    for bit in chance.sample(range(first, first + width), count):
        simhash ^= 1 << bit
    return simhash


def splits(distance: int) -> list[tuple[int, int, int]]:
    """All ways to spread so many bits over the chunks."""
    return [(a, b, distance - a - b) for a in range(distance + 1) for b in range(distance + 1 - a)]


def found(
    table: _native.NearTable, queries: list[int], max_distance: int, scans: int = 0
) -> list[tuple[int, ...]]:
    rows = table.search(array("Q", queries).tobytes(), max_distance, scans)
    return sorted(struct.iter_unpack("<III", rows))


def expected(stored: list[int], queries: list[int], max_distance: int) -> list[tuple[int, ...]]:
    hits = []
    for query, simhash in enumerate(queries):
        for number, other in enumerate(stored):
            distance = (simhash ^ other).bit_count()
            if distance <= max_distance:
                hits.append((query, distance, number))
    return sorted(hits)


def adversaries(queries: list[int], bits: int, chance: random.Random) -> list[int]:
    """Every split of the distance over the chunks, in their leading bits, which are the ones that choose buckets."""
    stored = []
    for query in queries:
        for distance in range(11):
            for split in splits(distance):
                simhash = query
                for (first, width), count in zip(CHUNKS, split, strict=True):
                    leading = min(bits, width)
                    if count <= leading:
                        simhash = flip(simhash, first + width - leading, leading, count, chance)
                    else:
                        simhash = flip(simhash, first, width, count, chance)
                stored.append(simhash)
    return stored


@pytest.mark.parametrize("bits", [6, 7, 11, 15, 20])
@pytest.mark.parametrize("queries_count", [1, 80])
def test_every_split_of_the_distance_over_the_chunks_is_found(bits: int, queries_count: int) -> None:
    chance = random.Random(bits)
    table = _native.NearTable(bits)
    queries = [chance.getrandbits(64) for _ in range(queries_count)]
    stored = adversaries(queries[:4], bits, chance)
    table.insert(array("Q", stored).tobytes())
    for max_distance in range(9):
        there_is = expected(stored, queries, max_distance)
        for scans in SCANS:
            hits = found(table, queries, max_distance, scans)
            assert hits == there_is, f"within {max_distance}, each once, by scan {scans}"


@pytest.mark.parametrize("bits", [6, 9, 10, 12, 13, 15, 16, 18, 19])
@pytest.mark.parametrize("queries_count", [3, 80])
def test_nothing_is_lost_or_doubled_while_buckets_are_split(bits: int, queries_count: int) -> None:
    """Before, in the middle of and behind a growth by one bit, and of the next: words get other bits at 11, 14, 17."""
    chance = random.Random(bits)
    table = _native.NearTable(bits)
    queries = [chance.getrandbits(64) for _ in range(queries_count)]
    stored = adversaries(queries[:2], bits, chance) + [queries[0]] * 20
    stored += [chance.getrandbits(64) for _ in range(3_000)]
    table.insert(array("Q", stored).tobytes())
    ends = sorted({simhash >> (64 - bits) for simhash in stored[:3]})
    for step in [1, *(end + 1 for end in ends), 1 << (bits - 1), 1 << bits, 1 << (bits - 1)]:
        if bits == 19 and step == 1 << (bits - 1) and table.split(0)[0] == 20:
            break
        now_bits, frontier = split_up_to(table, step)
        assert now_bits in (bits, bits + 1)
        assert frontier < 1 << now_bits
        more = [chance.getrandbits(64) for _ in range(50)] + [flip(queries[1], 0, 64, 7, chance)]
        table.insert(array("Q", more).tobytes())
        stored += more
        for max_distance in (0, 5, 8):
            hits = found(table, queries, max_distance)
            assert hits == expected(stored, queries, max_distance), (step, now_bits, frontier)


def split_up_to(table: _native.NearTable, frontier: int) -> tuple[int, int]:
    """Or to the end of the doubling."""
    bits, now = table.split(0)
    before = bits
    while bits == before and now < frontier:
        bits, now = table.split(frontier - now)
    return bits, now


@pytest.mark.parametrize("bits", [10, 13, 16])
@pytest.mark.parametrize("scans", SCANS)
def test_words_made_anew_follow_what_comes_and_goes(bits: int, scans: int) -> None:
    """Few splits at a time, so that most of the growth finds a piece of the words collected in part."""
    chance = random.Random(bits)
    table = _native.NearTable(bits, scans)
    queries = [chance.getrandbits(64) for _ in range(3)]
    stored = adversaries(queries[:1], bits, chance) + [queries[1]] * 40
    gone = (1 << 64) - 1
    table.insert(array("Q", stored).tobytes())
    step = 1 << (bits - 7)
    looks = 0
    while table.split(step)[0] == bits:
        for number in chance.sample(range(len(stored)), 20):
            if stored[number] != gone:
                table.erase(stored[number], number)
                stored[number] = gone
        more = [flip(chance.choice(queries), 0, 64, chance.randrange(20), chance) for _ in range(20)]
        table.insert(array("Q", more).tobytes())
        stored += more
        looks += 1
        if looks % 16 == 0:
            assert found(table, queries, 8) == expected(stored, queries, 8), looks
    assert looks > 128, "half of the time goes to the words"
    for number in [number for number, simhash in enumerate(stored) if simhash != gone]:
        table.erase(stored[number], number)
    assert found(table, queries, 8) == []


@pytest.mark.parametrize("scans", SCANS)
def test_equal_simhashes_and_shared_chunks_are_found_once_each(scans: int) -> None:
    """Crowds: the same SimHash, the same chunk A with any B and C, the same B with any other."""
    chance = random.Random(3)
    base = chance.getrandbits(64)
    stored = [base] * 200
    for first, width in CHUNKS:
        keep = ((1 << width) - 1) << first
        stored += [base & keep | chance.getrandbits(64) & ~keep & (1 << 64) - 1 for _ in range(300)]
    stored += [flip(base, 0, 64, chance.randrange(12), chance) for _ in range(600)]
    chance.shuffle(stored)
    table = _native.NearTable(12)
    table.insert(array("Q", stored).tobytes())
    queries = [flip(base, 0, 64, chance.randrange(10), chance) for _ in range(70)]
    for max_distance in (0, 4, 8):
        assert found(table, queries, max_distance, scans) == expected(stored, queries, max_distance)


@pytest.mark.parametrize("value", [0, (1 << 64) - 1, 1, 1 << 63])
def test_the_ends_of_the_range(value: int) -> None:
    table = _native.NearTable(10)
    stored = [value, value ^ 1, value ^ 1 << 63, value ^ 0xFF, value ^ 0x1FF, value ^ 0xFF << 56]
    table.insert(array("Q", stored).tobytes())
    assert found(table, [value], 8) == expected(stored, [value], 8)


def test_large_batches_are_counted_another_way_and_find_the_same() -> None:
    chance = random.Random(4)
    stored = [chance.getrandbits(64) for _ in range(400)]
    table = _native.NearTable(14)
    table.insert(array("Q", stored).tobytes())
    queries = [flip(stored[i % 400], 0, 64, chance.randrange(10), chance) for i in range(1_500)]
    assert found(table, queries, 8) == expected(stored, queries, 8)


@pytest.mark.parametrize("bits", [6, 7, 8, 12])
def test_so_many_queries_that_regions_are_smaller_find_the_same_while_buckets_are_split(bits: int) -> None:
    chance = random.Random(bits)
    stored = [chance.getrandbits(64) for _ in range(150)]
    table = _native.NearTable(bits)
    table.insert(array("Q", stored).tobytes())
    queries = [flip(stored[i % 150], 0, 64, chance.randrange(6, 11), chance) for i in range(8_200)]
    near = expected(stored, queries, 8)
    for step in (0, 1, (1 << bits) // 3, 1 << bits):
        split_up_to(table, step)
        assert found(table, queries, 8) == near, step


@pytest.mark.parametrize("scans", SCANS)
@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("words", [0, 1, 7, 8, 14, 15, 16, 30, 31, 32, 46, 47, 61, 62, 80])
def test_a_bucket_of_any_length_is_searched_to_its_end(words: int, chunk: int, scans: int) -> None:
    """Its words fill lines and nodes to the last, or just not; no other table leads to what they name."""
    chance = random.Random(words)
    base = chance.getrandbits(64)
    stored = [base] * words
    for number in range(words):
        for first, width in CHUNKS[:chunk]:
            stored[number] = flip(stored[number], first + width - 6, 6, 3, chance)
        stored[number] = flip(stored[number], CHUNKS[chunk][0], 10, chance.randrange(2), chance)
    table = _native.NearTable(6)
    table.insert(array("Q", stored).tobytes())
    for number in range(0, words, 3):
        table.erase(stored[number], number)
    queries = [flip(base, 0, 22, chance.randrange(3), chance) for _ in range(70)]
    near = [
        (query, (asked ^ simhash).bit_count(), number)
        for query, asked in enumerate(queries)
        for number, simhash in enumerate(stored)
        if number % 3 and (asked ^ simhash).bit_count() <= 8
    ]
    assert found(table, queries, 8, scans) == sorted(near)
    assert found(table, queries[:1], 8, scans) == sorted(row for row in near if row[0] == 0)
