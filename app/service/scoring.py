"""From depths in blocks of each context to rows of the answer, best first. Pure: no index, no clock.

A model can have contexts of several block sizes at once (engine blocks of 16 tokens beside offloaded chunks
of 256, or pods that differ). Their depths are compared in tokens, and a source reaches as far as its deepest
context does, tier by tier: a chunk on the CPU that covers what the GPU holds, and more, is loaded from where
the GPU's run ends. Then everything is counted in blocks of the answer's one unit. Cost: one pass over the
rows and a sort.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from app.events import Tier
from app.index.prefix_index import Depths
from app.pods import Source, SourceState
from app.service.hints import Hint

Reach = tuple[int, int, int, int, int]  # tokens on each tier (cumulative, fast to slow), then speculative

TIER_LABELS = tuple(tier.label for tier in Tier)


class MatchRow(msgspec.Struct, frozen=True):
    """What one source has of the prompt. Blocks are of the answer's `block_size`."""

    pod: str
    dp_rank: int
    matched_blocks: int
    matched_tokens: int
    reusable_tokens: (
        int  # what the engine would not compute again: whole blocks of its own, and never the last token
    )
    percent: float
    tiers: Mapping[str, int]  # tier label -> depth in blocks, cumulative from fast to slow
    speculative_blocks: int  # depth when blocks announced by AddPrefix count too; >= matched_blocks
    state: SourceState
    last_event_age_s: float | None
    hints: tuple[Hint, ...] = ()  # longest prefixes first


def merge_depths(answers: Iterable[tuple[int, Sequence[Depths]]]) -> dict[int, Reach]:
    """How far each source reaches, from (block size, depths) of every context that was asked."""
    reaches: dict[int, Reach] = {}
    for block_size, depths in answers:
        for row in depths:
            gpu, cpu, disk, external = row.tiers
            reach = (
                gpu * block_size,
                cpu * block_size,
                disk * block_size,
                external * block_size,
                row.speculative * block_size,
            )
            known = reaches.get(row.source)
            reaches[row.source] = reach if known is None else _deeper(known, reach)
    return reaches


def build_row(
    source: Source, reach: Reach, *, unit: int, tokens: int, now_s: float, hints: tuple[Hint, ...] = ()
) -> MatchRow:
    matched_tokens = reach[3]
    matched_blocks = matched_tokens // unit
    blocks = tokens // unit
    own = source.block_size or unit
    return MatchRow(
        source.pod,
        source.dp_rank,
        matched_blocks,
        matched_tokens,
        own * min(matched_tokens // own, max(tokens - 1, 0) // own),
        100 * matched_blocks / blocks if blocks else 0.0,
        {label: depth // unit for label, depth in zip(TIER_LABELS, reach, strict=False)},
        reach[4] // unit,
        source.state,
        None if source.last_event_at_s is None else _in_ms(now_s - source.last_event_at_s),
        hints,
    )


def _in_ms(age_s: float) -> float:
    """To the millisecond: what is below is noise, and costs as much to write as the rest of a row."""
    return math.floor(age_s * 1000 + 0.5) / 1000


def rank_rows(rows: Iterable[MatchRow]) -> tuple[MatchRow, ...]:
    """Best first: most tokens, then most announced, then on the fastest tiers, then by name and rank."""
    return tuple(sorted(rows, key=_order))


def _order(row: MatchRow) -> tuple[int | str, ...]:
    depths = [-row.tiers[label] for label in TIER_LABELS]
    return (-row.matched_tokens, -row.speculative_blocks, *depths, row.pod, row.dp_rank)


def _deeper(one: Reach, other: Reach) -> Reach:
    return (
        max(one[0], other[0]),
        max(one[1], other[1]),
        max(one[2], other[2]),
        max(one[3], other[3]),
        max(one[4], other[4]),
    )
