"""The hash table alone, on keys that are chosen: nothing is lost or found twice, whatever way its segments go.

Two tables do everything together, one of them growing as on a machine without wide registers: their entries lie in the
same places all the time. Such a pair is dense, as the tables of prefixes are, or loose, as that of names is.
"""

from __future__ import annotations

import random
import struct
from array import array
from dataclasses import dataclass

import pytest

from app._native import IdTable, LooseIdTable, LooseNarrowIdTable, NarrowIdTable


@dataclass(frozen=True)
class Kind:
    tables: tuple[type[IdTable], type[IdTable]]
    bytes_an_entry: tuple[float, float]  # from 100,000 on: the least, the most


KINDS = {
    "dense": Kind((IdTable, NarrowIdTable), (7.5, 8.0)),
    "loose": Kind((LooseIdTable, LooseNarrowIdTable), (9.8, 10.6)),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


class Twins:
    def __init__(self, kind: Kind, r: random.Random, expected: int = 0) -> None:
        self.kind = kind
        self.r = r
        self.tables = tuple(table() for table in kind.tables)
        self.keys = array("Q")
        self.live: list[int] = []
        for table in self.tables:
            table.reserve(expected)

    def insert(self, count: int, shared_bits: int = 0) -> None:
        """Keys that share so many leading bits."""
        keys = array("Q", self.r.randbytes(8 * count))
        if shared_bits:
            top, rest = (
                0x43210ABCDEF12345 >> (64 - shared_bits) << (64 - shared_bits),
                (1 << 64 - shared_bits) - 1,
            )
            keys = array("Q", (top | key & rest for key in keys))
        self.live.extend(range(len(self.keys), len(self.keys) + count))
        self.keys.extend(keys)
        for table in self.tables:
            table.insert(keys.tobytes())

    def erase(self, count: int) -> None:
        self.r.shuffle(self.live)
        gone = array("I", self.live[len(self.live) - count :])
        del self.live[len(self.live) - count :]
        for table in self.tables:
            table.erase(gone.tobytes())
        assert self.numbers(gone) == b""

    def numbers(self, of: array[int]) -> bytes:
        keys = array("Q", (self.keys[number] for number in of)).tobytes()
        found, same = (table.numbers(keys) for table in self.tables)
        assert found == same
        return found

    def check(self) -> None:
        live = array("I", self.live)
        assert self.numbers(live) == live.tobytes()
        places, same = (table.all() for table in self.tables)
        assert places == same
        assert sorted(array("I", places)) == sorted(live)

    def check_bytes(self) -> None:
        least, most = self.kind.bytes_an_entry
        assert least <= self.tables[0].bytes() / len(self.live) <= most


def test_every_size_up_to_a_segment(kind: Kind) -> None:
    twins = Twins(kind, random.Random(1))
    for _ in range(60):
        twins.insert(200)
        twins.check()


def test_uniform_keys_through_splits_and_fresh_tags(kind: Kind) -> None:
    twins = Twins(kind, random.Random(2))
    twins.insert(100_000)
    while len(twins.live) < 330_000:
        twins.insert(23_000)
        twins.check()
        twins.check_bytes()
    twins.erase(200_000)  # buckets with gaps, and full ones that were passed no more
    twins.check()
    twins.insert(300_000)
    twins.check()
    twins.check_bytes()


@pytest.mark.parametrize("expected", [150_000, 200_000, 250_000])
def test_a_table_that_was_told_what_comes(kind: Kind, expected: int) -> None:
    twins = Twins(kind, random.Random(3), expected)
    twins.insert(expected)
    twins.check()
    twins.check_bytes()


@pytest.mark.parametrize("seed", range(4))
def test_skewed_keys(kind: Kind, seed: int) -> None:
    r = random.Random(seed)
    twins = Twins(kind, r)
    for _ in range(12):
        twins.insert(r.randrange(1_000, 9_000), r.choice([0, 0, 0, 2, 4, 7, 10]))
        twins.check()
        if r.random() < 0.5:
            twins.erase(len(twins.live) // r.choice([2, 3, 10]))
            twins.check()


@pytest.mark.parametrize("shared_bits", [0, 4])
def test_memory_goes_back(kind: Kind, shared_bits: int) -> None:
    twins = Twins(kind, random.Random(4))
    twins.insert(60_000, shared_bits)
    before = twins.tables[0].bytes()
    while twins.live:
        twins.erase(min(len(twins.live), 7_000))
        twins.check()
    assert twins.tables[0].bytes() < before / 2


def test_keys_that_are_all_the_same(kind: Kind) -> None:
    twins = Twins(kind, random.Random(5))
    for table in twins.tables:
        table.insert(struct.pack("<Q", 0x7777 << 48) * 1_500)
    assert sorted(array("I", twins.tables[0].numbers(struct.pack("<Q", 0x7777 << 48)))) == list(range(1_500))
    for table in twins.tables:
        table.erase(array("I", range(0, 1_500, 2)).tobytes())
    assert sorted(array("I", twins.tables[0].all())) == list(range(1, 1_500, 2))
