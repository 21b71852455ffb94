from __future__ import annotations

import dataclasses

import pytest

from app.index.prefix_index import Depths
from app.pods import Source, SourceState
from app.service.scoring import MatchRow, build_row, merge_depths, rank_rows


def source(name: str = "a", dp_rank: int = 0, block_size: int | None = 16) -> Source:
    return Source(name, dp_rank, 0, block_size=block_size)


def row(
    reach: tuple[int, int, int, int, int], *, tokens: int, unit: int = 16, own: int | None = 16
) -> MatchRow:
    return build_row(source(block_size=own), reach, unit=unit, tokens=tokens, now_s=0.0)


# -- merging contexts of several block sizes


def test_one_context_is_counted_in_tokens() -> None:
    answer = [Depths(7, (1, 2, 2, 3), 4), Depths(8, (0, 0, 0, 0), 1)]
    assert merge_depths([(16, answer)]) == {7: (16, 32, 32, 48, 64), 8: (0, 0, 0, 0, 16)}


def test_deepest_context_wins_tier_by_tier() -> None:
    engine = (16, [Depths(7, (20, 20, 20, 20), 20)])  # 320 tokens on the GPU
    chunks = (256, [Depths(7, (0, 2, 2, 2), 2)])  # 512 tokens on the CPU
    assert merge_depths([engine, chunks]) == {7: (320, 512, 512, 512, 512)}
    assert merge_depths([chunks, engine]) == {7: (320, 512, 512, 512, 512)}


def test_shallower_chunks_do_not_shorten_the_gpu_run() -> None:
    engine = (16, [Depths(7, (20, 20, 20, 20), 20)])
    chunks = (256, [Depths(7, (0, 1, 1, 1), 1)])
    assert merge_depths([engine, chunks]) == {7: (320, 320, 320, 320, 320)}


def test_sources_of_different_contexts_stand_side_by_side() -> None:
    assert merge_depths([(16, [Depths(1, (1, 1, 1, 1), 1)]), (32, [Depths(2, (1, 1, 1, 1), 1)])]) == {
        1: (16, 16, 16, 16, 16),
        2: (32, 32, 32, 32, 32),
    }


# -- rows


@pytest.mark.parametrize(
    ("matched", "tokens", "reusable"),
    [
        (64, 64, 48),  # the whole prompt is held: its last token is computed all the same
        (64, 65, 64),
        (48, 64, 48),
        (0, 64, 0),
        (16, 16, 0),
    ],
)
def test_the_last_token_is_never_reused(matched: int, tokens: int, reusable: int) -> None:
    assert row((matched,) * 5, tokens=tokens).reusable_tokens == reusable


def test_reusable_tokens_are_whole_blocks_of_the_engine() -> None:
    assert row((48, 48, 48, 48, 48), tokens=64, unit=16, own=32).reusable_tokens == 32
    assert row((48, 48, 48, 48, 48), tokens=64, unit=16, own=None).reusable_tokens == 48


def test_everything_is_counted_in_blocks_of_the_answer() -> None:
    found = row((160, 256, 256, 256, 272), tokens=320)
    assert found.matched_blocks == 16
    assert found.matched_tokens == 256
    assert found.tiers == {"gpu": 10, "cpu": 16, "disk": 16, "external": 16}
    assert found.speculative_blocks == 17
    assert found.percent == 80.0


def test_percent_is_zero_without_a_full_block() -> None:
    assert row((0, 0, 0, 0, 0), tokens=15).percent == 0.0


def test_row_carries_trust_and_age() -> None:
    silent = source()
    heard = dataclasses.replace(source(), last_event_at_s=2.0, incomplete=True)
    assert build_row(silent, (16,) * 5, unit=16, tokens=32, now_s=5.0).last_event_age_s is None
    found = build_row(heard, (16,) * 5, unit=16, tokens=32, now_s=5.0)
    assert (found.state, found.last_event_age_s) == (SourceState.DEGRADED, 3.0)


# -- order


def placed(name: str, dp_rank: int, gpu: int, deepest: int, speculative: int) -> MatchRow:
    reach = (16 * gpu, 16 * deepest, 16 * deepest, 16 * deepest, 16 * speculative)
    return build_row(source(name, dp_rank), reach, unit=16, tokens=640, now_s=0.0)


def test_order_is_tokens_then_announced_then_fast_tiers_then_name_and_rank() -> None:
    best_first = [
        placed("z", 0, gpu=0, deepest=9, speculative=9),
        placed("y", 0, gpu=2, deepest=8, speculative=10),
        placed("x", 0, gpu=3, deepest=8, speculative=8),
        placed("a", 0, gpu=2, deepest=8, speculative=8),
        placed("a", 1, gpu=2, deepest=8, speculative=8),
        placed("b", 0, gpu=2, deepest=8, speculative=8),
    ]
    assert list(rank_rows(reversed(best_first))) == best_first
