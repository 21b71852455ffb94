"""Windows that match and who holds them -> the answer to a fuzzy match. Pure.

Pods hold blocks, each for the owners (agents) that claim it there, or for nobody in particular. What a pod holds
does not count when the pod is excluded, or when all who claim it are; of several claims the others are left.

A pod that holds a window's content in several places counts once for the same owners, with the best of them. A
summary, of a pod or of an owner, counts a window once, however many ranks or pods have it, and looks at all
holdings, not only at those that `limit_per_block` lets through.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Literal

import msgspec

from app.fuzzy.fuzzy_index import HASH_BITS, Slices, Window

Kind = Literal["exact", "near"]

_HOLDINGS_A_SLICE = 512  # looked at, about, before others have their turn


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Holding:
    """A rank that holds a block, and whom for: () when nobody was named."""

    pod: str
    dp_rank: int = 0
    owners: tuple[str, ...] = ()  # ascending


HoldingLookup = Callable[[Collection[int]], Mapping[int, Sequence[Holding]]]
"""The holdings of each prefix hash; those that nobody holds may be absent."""


class BlockMatch(msgspec.Struct, frozen=True):
    pod: str
    dp_rank: int
    owners: tuple[str, ...]
    cached_block_hash: int
    hamming_distance: int
    confidence: float
    kind: Kind


class FuzzyBlock(msgspec.Struct, frozen=True):
    block_index: int | None  # None off the block grid
    token_offset: int
    kind: Kind
    matches: tuple[BlockMatch, ...]  # best first


class Run(msgspec.Struct, frozen=True):
    """Neighbouring blocks of one kind."""

    token_offset: int
    tokens: int
    kind: Kind


class PodSummary(msgspec.Struct, frozen=True):
    pod: str
    reusable_blocks: int
    reusable_tokens: int
    coverage: float  # of the prompt's tokens
    mean_confidence: float  # over the reusable blocks


class OwnerSummary(msgspec.Struct, frozen=True):
    owner: str
    reusable_blocks: int
    reusable_tokens: int
    coverage: float
    mean_confidence: float


class FuzzyAnswer(msgspec.Struct, frozen=True):
    blocks: tuple[FuzzyBlock, ...]  # by offset
    runs: tuple[Run, ...]
    pods: tuple[PodSummary, ...]  # most tokens first
    owners: tuple[OwnerSummary, ...]  # most tokens first


class Holdings:
    """Who holds what, asked once a prefix hash in the course of a query, without what is excluded."""

    def __init__(self, lookup: HoldingLookup, exclude: Collection[str] = ()) -> None:
        self._lookup = lookup
        self._exclude = tuple(exclude)
        self._known: dict[int, tuple[Holding, ...]] = {}

    def usable(self, prefix_hashes: Set[int]) -> Set[int]:
        """Those of them that anybody left holds."""
        new = prefix_hashes - self._known.keys()
        if new:
            found = self._lookup(new)
            for prefix_hash in new:
                self._known[prefix_hash] = self._left(found.get(prefix_hash, ()))
        return {prefix_hash for prefix_hash in prefix_hashes if self._known[prefix_hash]}

    def of(self, prefix_hash: int) -> tuple[Holding, ...]:
        return self._known[prefix_hash]

    def _left(self, holdings: Sequence[Holding]) -> tuple[Holding, ...]:
        if not self._exclude:
            return tuple(sorted(holdings))
        left = []
        for holding in holdings:
            owners = tuple(owner for owner in holding.owners if not is_named(owner, self._exclude))
            if is_named(holding.pod, self._exclude) or (holding.owners and not owners):
                continue
            left.append(dataclasses.replace(holding, owners=owners))
        return tuple(sorted(left))


def is_named(name: str, by: Iterable[str]) -> bool:
    """`agent1` names `agent1` and its roles, as `agent1:system`, and not `agent10`."""
    return any(name == known or name.startswith(known + ":") for known in by)


def confidence(distance: int) -> float:
    return 1 - distance / HASH_BITS


def assemble(
    windows: Sequence[Window], holdings: Holdings, *, block_size: int, tokens: int, limit_per_block: int
) -> Slices[FuzzyAnswer]:
    """`windows` by offset, with usable matches only; `tokens` is the length of the prompt."""
    blocks = []
    of_pods: dict[str, list[int]] = {}
    of_owners: dict[str, list[int]] = {}
    looked_at = 0
    for window in windows:
        matches = _matches_of(window, holdings)
        _add_nearest(of_pods, ((match.pod, match.hamming_distance) for match in matches))
        _add_nearest(of_owners, ((o, match.hamming_distance) for match in matches for o in match.owners))
        on_grid = window.token_offset % block_size == 0
        blocks.append(
            FuzzyBlock(
                block_index=window.token_offset // block_size if on_grid else None,
                token_offset=window.token_offset,
                kind="exact" if window.exact else "near",
                matches=tuple(matches[:limit_per_block]),
            )
        )
        looked_at += sum(len(holdings.of(match.prefix_hash)) for match in window.matches)
        if looked_at >= _HOLDINGS_A_SLICE:
            looked_at = 0
            yield
    return FuzzyAnswer(
        tuple(blocks),
        merge_runs(blocks, block_size),
        tuple(PodSummary(*row) for row in _summaries(of_pods, block_size, tokens)),
        tuple(OwnerSummary(*row) for row in _summaries(of_owners, block_size, tokens)),
    )


def merge_runs(blocks: Sequence[FuzzyBlock], block_size: int) -> tuple[Run, ...]:
    runs: list[Run] = []
    for block in blocks:
        last = runs[-1] if runs else None
        if last and last.kind == block.kind and last.token_offset + last.tokens == block.token_offset:
            runs[-1] = Run(last.token_offset, last.tokens + block_size, last.kind)
        else:
            runs.append(Run(block.token_offset, block_size, block.kind))
    return tuple(runs)


def _matches_of(window: Window, holdings: Holdings) -> list[BlockMatch]:
    best: dict[Holding, BlockMatch] = {}
    for match in window.matches:
        for holding in holdings.of(match.prefix_hash):
            if holding not in best:
                best[holding] = BlockMatch(
                    pod=holding.pod,
                    dp_rank=holding.dp_rank,
                    owners=holding.owners,
                    cached_block_hash=match.prefix_hash,
                    hamming_distance=match.distance,
                    confidence=confidence(match.distance),
                    kind="exact" if match.exact else "near",
                )
    return list(best.values())


def _add_nearest(distances: dict[str, list[int]], found: Iterable[tuple[str, int]]) -> None:
    """One distance for each name, that which comes first."""
    nearest: dict[str, int] = {}
    for name, distance in found:
        nearest.setdefault(name, distance)
    for name, distance in nearest.items():
        distances.setdefault(name, []).append(distance)


def _summaries(
    distances: Mapping[str, Sequence[int]], block_size: int, tokens: int
) -> list[tuple[str, int, int, float, float]]:
    """Name, blocks, tokens, coverage and mean confidence; most tokens first."""
    rows = [
        (
            name,
            len(found),
            len(found) * block_size,
            len(found) * block_size / tokens,
            sum(map(confidence, found)) / len(found),
        )
        for name, found in distances.items()
    ]
    return sorted(rows, key=lambda row: (-row[2], -row[4], row[0]))
