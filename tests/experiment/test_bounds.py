"""Bounds worked out by hand, and against the paged cache of a pod."""

from __future__ import annotations

from pathlib import Path

from app.experiment.bounds import hit_rate
from app.experiment.trace import Trace, TraceRequest, load_trace
from app.simulator.kv_cache import KVCacheSettings, PagedKVCache
from tests.experiment.traces import conversations, write_mooncake


def trace(*prompts: tuple[int, ...], tokens: int | None = None) -> Trace:
    return Trace(
        "by hand",
        8,
        tuple(
            TraceRequest(float(at), 8 * len(blocks) if tokens is None else tokens, 1, blocks)
            for at, blocks in enumerate(prompts)
        ),
    )


def test_a_repeated_prompt_computes_its_last_block() -> None:
    assert hit_rate(trace((1, 2, 3), (1, 2, 3)), block_size=8, capacity_blocks=None) == 2 / 6


def test_a_partial_block_is_asked_for_and_never_found() -> None:
    again = trace((1, 2, 3), (1, 2, 3), tokens=20)
    assert hit_rate(again, block_size=8, capacity_blocks=None) == 2 / 6
    assert hit_rate(again, block_size=4, capacity_blocks=None) == 4 / 10


def test_a_full_cache_loses_the_leaf_of_the_oldest_prompt() -> None:
    lost = trace((1, 2), (3, 4), (1, 2, 5))
    assert hit_rate(lost, block_size=8, capacity_blocks=4) == 2 / 7
    assert hit_rate(lost, block_size=8, capacity_blocks=3) == 1 / 7
    assert hit_rate(lost, block_size=8, capacity_blocks=2) == 0.0


def test_the_shared_bound_is_what_one_paged_cache_of_that_size_finds(tmp_path: Path) -> None:
    made = load_trace(write_mooncake(tmp_path / "t.jsonl", conversations(sessions=12, turns=6)))
    for pages in (40, 80, 10_000):
        cache = PagedKVCache(KVCacheSettings(capacity_pages=pages, block_size=512, nameless_first=False))
        hits = asked = 0
        for number, request in enumerate(made.requests):
            tokens = made.token_ids(number)
            full = len(tokens) // 512 * 512
            asked += -(-len(tokens) // 512)
            hits += cache.lookup(tokens) // 512
            if full:
                # Partial blocks take a page in a real cache; the bound has no page for them.
                cache.attach(str(number), tokens[:full])
                cache.detach(str(number))
            assert request.prompt_tokens == len(tokens)
        bound = hit_rate(made, block_size=512, capacity_blocks=pages)
        assert abs(bound - hits / asked) <= (0.02 if pages < 10_000 else 1e-12), pages
