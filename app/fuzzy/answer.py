"""Windows that match and who holds them -> the answer to a fuzzy match. Pure.

An owner that holds a window's content in several places counts once, with the best of them. A summary of a
pod counts a window once, however many ranks of it hold it, and looks at all owners, not only at those that
`limit_per_block` lets through.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Literal

import msgspec

from app.fuzzy.fuzzy_index import HASH_BITS, Window

Kind = Literal["exact", "near"]


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Owner:
    """`pod` may also be the name of an agent that announced the block."""

    pod: str
    dp_rank: int = 0


HolderLookup = Callable[[Collection[int]], Mapping[int, Sequence[Owner]]]
"""The owners of each prefix hash; those that nobody holds may be absent."""


class BlockMatch(msgspec.Struct, frozen=True):
    pod: str
    dp_rank: int
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


class FuzzyAnswer(msgspec.Struct, frozen=True):
    blocks: tuple[FuzzyBlock, ...]  # by offset
    runs: tuple[Run, ...]
    pods: tuple[PodSummary, ...]  # most tokens first


class Owners:
    """Who holds what, asked once a prefix hash in the course of a query, without those that are excluded."""

    def __init__(self, lookup: HolderLookup, exclude: Collection[str] = ()) -> None:
        self._lookup = lookup
        self._exclude = tuple(exclude)
        self._known: dict[int, tuple[Owner, ...]] = {}

    def usable(self, prefix_hashes: Set[int]) -> Set[int]:
        """Those of them that anybody left holds."""
        new = prefix_hashes - self._known.keys()
        if new:
            found = self._lookup(new)
            for prefix_hash in new:
                owners = found.get(prefix_hash, ())
                self._known[prefix_hash] = tuple(
                    sorted(owner for owner in owners if not is_excluded(owner.pod, self._exclude))
                )
        return {prefix_hash for prefix_hash in prefix_hashes if self._known[prefix_hash]}

    def of(self, prefix_hash: int) -> tuple[Owner, ...]:
        return self._known[prefix_hash]


def is_excluded(name: str, exclude: Iterable[str]) -> bool:
    """`agent1` also excludes `agent1:system`, and not `agent10`."""
    return any(name == excluded or name.startswith(excluded + ":") for excluded in exclude)


def confidence(distance: int) -> float:
    return 1 - distance / HASH_BITS


def assemble(
    windows: Sequence[Window], owners: Owners, *, block_size: int, tokens: int, limit_per_block: int
) -> FuzzyAnswer:
    """`windows` by offset, with usable matches only; `tokens` is the length of the prompt."""
    blocks = []
    distances: dict[str, list[int]] = {}
    for window in windows:
        matches = _matches_of(window, owners)
        nearest: dict[str, int] = {}
        for match in matches:
            nearest.setdefault(match.pod, match.hamming_distance)
        for pod, distance in nearest.items():
            distances.setdefault(pod, []).append(distance)
        on_grid = window.token_offset % block_size == 0
        blocks.append(
            FuzzyBlock(
                block_index=window.token_offset // block_size if on_grid else None,
                token_offset=window.token_offset,
                kind="exact" if window.exact else "near",
                matches=tuple(matches[:limit_per_block]),
            )
        )
    pods = [_summary(pod, found, block_size, tokens) for pod, found in distances.items()]
    pods.sort(key=lambda pod: (-pod.reusable_tokens, -pod.mean_confidence, pod.pod))
    return FuzzyAnswer(tuple(blocks), merge_runs(blocks, block_size), tuple(pods))


def merge_runs(blocks: Sequence[FuzzyBlock], block_size: int) -> tuple[Run, ...]:
    runs: list[Run] = []
    for block in blocks:
        last = runs[-1] if runs else None
        if last and last.kind == block.kind and last.token_offset + last.tokens == block.token_offset:
            runs[-1] = Run(last.token_offset, last.tokens + block_size, last.kind)
        else:
            runs.append(Run(block.token_offset, block_size, block.kind))
    return tuple(runs)


def _matches_of(window: Window, owners: Owners) -> list[BlockMatch]:
    best: dict[Owner, BlockMatch] = {}
    for match in window.matches:
        for owner in owners.of(match.prefix_hash):
            if owner not in best:
                best[owner] = BlockMatch(
                    pod=owner.pod,
                    dp_rank=owner.dp_rank,
                    cached_block_hash=match.prefix_hash,
                    hamming_distance=match.distance,
                    confidence=confidence(match.distance),
                    kind="exact" if match.exact else "near",
                )
    return list(best.values())


def _summary(pod: str, distances: Sequence[int], block_size: int, tokens: int) -> PodSummary:
    reusable_tokens = len(distances) * block_size
    return PodSummary(
        pod=pod,
        reusable_blocks=len(distances),
        reusable_tokens=reusable_tokens,
        coverage=reusable_tokens / tokens,
        mean_confidence=sum(map(confidence, distances)) / len(distances),
    )
