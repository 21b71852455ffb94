"""The fuzzy index as plain Python: SimHash counted bit by bit, answers by looking at everything."""

from __future__ import annotations

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
    result = 0
    for bit in range(64):
        if sum(word >> bit & 1 for word in words) > len(words) // 2:
            result |= 1 << bit
    return result


def content_hash(tokens: Sequence[int]) -> int:
    return xxhash.xxh64_intdigest(array("I", tokens).tobytes())


class ReferenceIndex:
    """One context. `blocks` maps a prefix hash to the tokens of its block."""

    def __init__(self, block_size: int, shingle: int = 1) -> None:
        self.block_size = block_size
        self.shingle = shingle
        self.blocks: dict[int, tuple[int, ...]] = {}
        self._hashes: dict[tuple[int, ...], tuple[int, int]] = {}

    def hashes(self, tokens: Sequence[int]) -> tuple[int, int]:
        key = tuple(tokens)
        if key not in self._hashes:
            self._hashes[key] = simhash(key, self.shingle), content_hash(key)
        return self._hashes[key]

    def matches(self, tokens: Sequence[int], max_distance: int, usable: Set[int]) -> list[Match]:
        query, content = self.hashes(tokens)
        found = []
        for prefix_hash, stored in self.blocks.items():
            stored_simhash, stored_content = self.hashes(stored)
            distance = (query ^ stored_simhash).bit_count()
            if distance <= max_distance and prefix_hash in usable:
                found.append(Match(prefix_hash, distance, stored_content == content))
        return sorted(found, key=lambda match: (not match.exact, match.distance, match.prefix_hash))

    def grid(self, tokens: Sequence[int], max_distance: int, usable: Set[int]) -> list[Window]:
        windows = []
        for offset in range(0, len(tokens) - self.block_size + 1, self.block_size):
            matches = self.matches(tokens[offset : offset + self.block_size], max_distance, usable)
            if matches:
                windows.append(Window(offset, tuple(matches)))
        return windows
