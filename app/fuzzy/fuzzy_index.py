"""Blocks by content: the thin Python front of native/fuzzy_index.hpp, and the two ways to ask.

A *window* is block_size tokens of a prompt, at any token offset. A window matches a block *exactly* when
their 64-bit content hashes agree, *nearly* when their SimHashes differ in at most `max_distance` of 64 bits.

grid     the windows at multiples of the block size, each with whatever matches it
sliding  every offset is looked up; of the windows that match, those are kept that do not overlap and cover
         most: first as many exact ones as fit, then, in what they leave, as many near ones as fit, the
         closest first

The index knows prefix hashes and contents, not who holds them. `usable` tells which of some prefix hashes are
held by anybody the caller cares for; what is not usable neither matches nor takes a place from what is.

A question can be asked in slices (`grid_slices`, `sliding_slices`), and the index may change between them. What is
stored all the while is found as if it had been asked at once; what comes or goes meanwhile is found or not, and
nothing is that had gone before the question began or came after it ended.

Blocks whose meaning is not in their tokens alone (blocks with extra keys: a cache salt, an image) must not be
stored here.

Cost: see docs/fuzzy-match.md. No index is made where the feature is off, and then it costs nothing.
"""

from __future__ import annotations

import dataclasses
import struct
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from itertools import groupby
from typing import TypeAlias, TypeVar

from app.errors import InvalidInput, NativeCoreMissing

try:
    from app import _native
except ImportError as error:
    raise NativeCoreMissing from error

MAX_DISTANCE = 8  # the tables find everything within it, and nothing is promised beyond
HASH_BITS = 64
_ROW = struct.Struct("<IHHQ")

# What a slice of a question does at most, about: each is well below half a millisecond of work.
_WORK_A_SLICE = 40_960  # of a search (native/near_search.hpp)
_WINDOWS_A_SLICE = 512
_MATCHES_A_SLICE = 128
_WEIGHED_A_SLICE = 1_024  # windows

Usable = Callable[[Set[int]], Set[int]]

Answer = TypeVar("Answer")
Slices: TypeAlias = Generator[None, None, Answer]
"""Work in slices; between two of them anything may happen to the index."""


@dataclasses.dataclass(frozen=True, slots=True)
class FuzzyLimits:
    """`shingle`: tokens a vote of the SimHash (1: the order of tokens does not count).
    `matches_per_window_max`: blocks considered for one window, best first; what is dropped for it is counted.
    `scans`: 0 for the fastest code that this machine runs; others are for tests."""

    shingle: int = 1
    matches_per_window_max: int = 256
    scans: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    prefix_hash: int
    distance: int
    exact: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    token_offset: int
    matches: tuple[Match, ...]  # at least one, best first

    @property
    def exact(self) -> bool:
        return self.matches[0].exact


@dataclasses.dataclass(frozen=True, slots=True)
class FuzzyStats:
    contexts: int
    blocks: int  # entries, removed ones that are not swept yet too
    same_content: int  # of them: known to be beyond the first with their content
    backlog: int  # of them: not put in the tables yet, as no question has been asked since they came
    asleep: int  # contexts of which no question has been asked, or none for long
    unswept: int  # removed, hidden already, their place not given back yet
    crowded: int  # contents that only exact matches find: too many others are nearly the same
    bytes: int
    matches_dropped: int  # by matches_per_window_max, since the start


class FuzzyIndex:
    """Contexts are named by their numbers in the prefix index. Buffers are little-endian."""

    def __init__(self, limits: FuzzyLimits) -> None:
        self._limits = limits
        self._core = _native.FuzzyIndex(limits.shingle, limits.scans)
        self._block_sizes: dict[int, int] = {}

    @property
    def core(self) -> _native.FuzzyIndex:
        """For a prefix index that is to store and remove its blocks here (app/index/prefix_index.py)."""
        return self._core

    @property
    def shingle(self) -> int:
        return self._limits.shingle

    # -- life of a block

    def add_context(self, context: int, block_size: int) -> bool:
        """Idempotent. False when blocks of this size have no SimHash: shorter than a shingle, or huge."""
        if context not in self._block_sizes:
            if not self._limits.shingle <= block_size <= 65_535:
                return False
            self._core.add_context(context, block_size)
            self._block_sizes[context] = block_size
        return True

    def drop_context(self, context: int) -> None:
        if self._block_sizes.pop(context, None) is not None:
            self._core.drop_context(context)

    def has_context(self, context: int) -> bool:
        return context in self._block_sizes

    def store(self, context: int, prefix_hashes: bytes, token_ids: bytes) -> None:
        """uint64 prefix hashes and block_size uint32 tokens for each. Prefix hash 0 is passed over."""
        blocks = len(prefix_hashes) // 8
        if len(prefix_hashes) % 8 or len(token_ids) != blocks * self._block_sizes[context] * 4:
            raise InvalidInput(
                f"{len(token_ids)} bytes of token ids do not fit {blocks} blocks of "
                f"{self._block_sizes[context]} tokens",
                field="token_ids",
            )
        self._core.insert(context, prefix_hashes, token_ids)

    def remove(self, context: int, prefix_hashes: bytes) -> None:
        """Unknown ones are ignored."""
        self._core.remove(context, prefix_hashes)

    def prefix_hashes(self, context: int) -> array[int]:
        """All that are stored, in no order. Walks everything: for tests and dumps."""
        return array("Q", self._core.prefixes(context))

    # -- questions, all at once or in slices

    def grid(self, context: int, token_ids: bytes, max_distance: int, usable: Usable) -> list[Window]:
        return finish(self.grid_slices(context, token_ids, max_distance, usable))

    def sliding(self, context: int, token_ids: bytes, max_distance: int, usable: Usable) -> list[Window]:
        return finish(self.sliding_slices(context, token_ids, max_distance, usable))

    def grid_slices(
        self, context: int, token_ids: bytes, max_distance: int, usable: Usable
    ) -> Slices[list[Window]]:
        block_size = self._block_sizes[context]
        last = len(token_ids) // 4 - block_size
        offsets = array("I", range(0, last + 1, block_size))
        return self._near(context, token_ids, offsets, max_distance, usable)

    def sliding_slices(
        self, context: int, token_ids: bytes, max_distance: int, usable: Usable
    ) -> Slices[list[Window]]:
        block_size = self._block_sizes[context]
        windows = max(0, len(token_ids) // 4 - block_size + 1)
        if windows == 0:
            return []
        _check(token_ids, max_distance)
        exact = yield from self._exact(context, token_ids, windows, usable)
        taken = yield from self._select(exact, windows, block_size)
        offsets = _free_offsets(taken, windows, block_size)
        yield
        near = yield from self._near(context, token_ids, offsets, max_distance, usable)
        chosen = set((yield from self._select(near, windows, block_size)))
        return [window for window in near if window.token_offset in chosen]

    def stats(self) -> FuzzyStats:
        return FuzzyStats(*self._core.statistics())

    def _exact(self, context: int, token_ids: bytes, windows: int, usable: Usable) -> Slices[list[Window]]:
        found: list[Window] = []
        window = 0
        while window < windows and context in self._block_sizes:
            rows, window = self._core.exact(
                context, token_ids, self._limits.matches_per_window_max, window, _WINDOWS_A_SLICE
            )
            found += _usable_windows(rows, usable)
            yield
        return found

    def _near(
        self, context: int, token_ids: bytes, offsets: array[int], max_distance: int, usable: Usable
    ) -> Slices[list[Window]]:
        _check(token_ids, max_distance)
        if context not in self._block_sizes:  # it went since the question began
            return []
        query = _native.NearQuery(
            self._core,
            context,
            token_ids,
            offsets.tobytes(),
            max_distance,
            self._limits.matches_per_window_max,
        )
        yield
        while not query.step(_WORK_A_SLICE):
            yield
        found: list[Window] = []
        done = False
        while not done:
            yield
            rows, done = query.take(_MATCHES_A_SLICE)
            found += _usable_windows(rows, usable)
        return found

    def _select(self, found: Sequence[Window], windows: int, block_size: int) -> Slices[array[int]]:
        """Token offsets, ascending, of what does not overlap."""
        weights = array("I", bytes(4 * windows))
        for begin in range(0, len(found), _WEIGHED_A_SLICE):
            for window in found[begin : begin + _WEIGHED_A_SLICE]:
                # A block more is worth more than any closeness, an exact one more than two near ones in its way.
                closeness = HASH_BITS - window.matches[0].distance
                weights[window.token_offset] = 1_000_000 if window.exact else 1_000 + closeness
            yield
        chosen = array("I", self._core.select(weights.tobytes(), block_size))
        yield
        return chosen


def finish(slices: Slices[Answer]) -> Answer:
    """All of it at once."""
    while True:
        try:
            next(slices)
        except StopIteration as done:
            answer: Answer = done.value
            return answer


def _check(token_ids: bytes, max_distance: int) -> None:
    if len(token_ids) % 4:
        raise InvalidInput(f"{len(token_ids)} bytes are not whole uint32 token ids", field="token_ids")
    if not 0 <= max_distance <= MAX_DISTANCE:
        raise InvalidInput(
            f"max_distance must be between 0 and {MAX_DISTANCE}, not {max_distance}", field="max_distance"
        )


def _usable_windows(rows: bytes, usable: Usable) -> Iterator[Window]:
    """`rows` are grouped by offset, best first within each."""
    found = list(_ROW.iter_unpack(rows))
    kept = usable({prefix_hash for _, _, _, prefix_hash in found}) if found else frozenset()
    for offset, group in groupby(found, key=lambda row: row[0]):
        matches = tuple(
            Match(prefix_hash, distance, bool(exact))
            for _, distance, exact, prefix_hash in group
            if prefix_hash in kept
        )
        if matches:
            yield Window(offset, matches)


def _free_offsets(exact: Sequence[int], windows: int, block_size: int) -> array[int]:
    """The exact windows and all that overlap none of them."""
    offsets = array("I")
    free = 0
    for offset in exact:
        offsets.extend(range(free, offset - block_size + 1))
        offsets.append(offset)
        free = offset + block_size
    offsets.extend(range(free, windows))
    return offsets
