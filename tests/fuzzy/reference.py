"""The fuzzy index as plain Python: SimHash counted bit by bit, answers by looking at everything."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence, Set

import xxhash

from app.fuzzy.fuzzy_index import Match, Window

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    word = (state + 0x9E3779B97F4A7C15) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def simhash(tokens: Sequence[int], shingle: int = 1) -> int:
    words = []
    for begin in range(len(tokens) - shingle + 1):
        word = 0
        for token in tokens[begin : begin + shingle]:
            word = splitmix64((word + token) & MASK)
        words.append(word)
    if len(words) % 2 == 0:
        words.append(max(words))
    columns = zip(*(f"{word:064b}" for word in words), strict=True)
    return int("".join("1" if column.count("1") > len(words) // 2 else "0" for column in columns), 2)


def content_hash(tokens: Sequence[int]) -> int:
    return xxhash.xxh64_intdigest(array("I", tokens).tobytes())


@functools.lru_cache(maxsize=1 << 16)
def hashes(tokens: tuple[int, ...], shingle: int) -> tuple[int, int]:
    """Remembered from test to test: many begin with the same blocks, and bit by bit is slow."""
    return simhash(tokens, shingle), content_hash(tokens)


class ReferenceIndex:
    """One context. `blocks` maps a prefix hash to the tokens of its block."""

    def __init__(self, block_size: int, shingle: int = 1) -> None:
        self.block_size = block_size
        self.shingle = shingle
        self.blocks: dict[int, tuple[int, ...]] = {}

    def matches(self, tokens: Sequence[int], max_distance: int, usable: Set[int]) -> list[Match]:
        return self._matches(tuple(tokens), max_distance, self._rows(usable))

    def _rows(self, usable: Set[int]) -> list[tuple[int, int, int]]:
        """Every usable block: its prefix hash, its SimHash, its content hash."""
        return [(p, *hashes(block, self.shingle)) for p, block in self.blocks.items() if p in usable]

    def _matches(
        self, tokens: tuple[int, ...], max_distance: int, rows: list[tuple[int, int, int]]
    ) -> list[Match]:
        query, content = hashes(tokens, self.shingle)
        found = [
            Match(prefix_hash, (query ^ stored).bit_count(), stored_content == content)
            for prefix_hash, stored, stored_content in rows
            if (query ^ stored).bit_count() <= max_distance
        ]
        return sorted(found, key=lambda match: (not match.exact, match.distance, match.prefix_hash))

    def grid(self, tokens: Sequence[int], max_distance: int, usable: Set[int]) -> list[Window]:
        rows = self._rows(usable)
        windows = []
        for offset in range(0, len(tokens) - self.block_size + 1, self.block_size):
            matches = self._matches(tuple(tokens[offset : offset + self.block_size]), max_distance, rows)
            if matches:
                windows.append(Window(offset, tuple(matches)))
        return windows
