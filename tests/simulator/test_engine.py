"""The scheduler: what is cached, what a step costs, what happens when pages or seats run out."""

from __future__ import annotations

import random
from typing import Any

import pytest

from app.errors import InvalidInput, LimitExceeded, Overloaded
from app.ingest.vllm import Cleared, Removed, Stored
from app.simulator.engine import Engine, Output, Prompt
from app.simulator.engine_settings import EngineSettings, TimeModel
from app.simulator.kv_cache import KVCacheSettings
from app.simulator.offload import OffloadSettings

BLOCK = 4


def engine(pages: int = 64, *, offload: OffloadSettings | None = None, **more: Any) -> Engine:
    cache = KVCacheSettings(capacity_pages=pages, block_size=BLOCK)
    return Engine(EngineSettings(cache=cache, offload=offload, **more))


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def run(one: Engine, name: str, prompt: Prompt) -> tuple[list[Output], list[Any]]:
    """The request's outputs and all events until it is finished."""
    one.submit(name, prompt)
    outputs: list[Output] = []
    events: list[Any] = []
    while not one.is_idle:
        step = one.step()
        assert step is not None
        outputs += [output for output in step.outputs if output.request == name]
        events += step.events
    return outputs, events


def cached(one: Engine, text: list[int], **more: Any) -> int:
    outputs, _ = run(one, "request", Prompt(text, max_tokens=1, **more))
    return outputs[0].cached_tokens


def test_idle_engine_has_no_step() -> None:
    assert engine().step() is None


@pytest.mark.parametrize(("length", "expected"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
def test_cached_tokens_are_whole_blocks_and_never_the_last_token(length: int, expected: int) -> None:
    one = engine()
    assert cached(one, tokens(11)) == 0
    assert cached(one, tokens(length)) == expected


def test_output_is_as_long_as_asked_and_equal_prompts_get_equal_outputs() -> None:
    one = engine()
    first, _ = run(one, "a", Prompt(tokens(5), max_tokens=7))
    second, _ = run(one, "b", Prompt(tokens(5), max_tokens=7))
    texts = [[token for output in outputs for token in output.token_ids] for outputs in (first, second)]
    assert len(texts[0]) == 7
    assert texts[0] == texts[1]
    assert [output.finished for output in first] == [False] * 6 + [True]


def test_decoded_blocks_are_told_one_by_one_and_the_last_token_is_never_computed() -> None:
    """As captured from an engine: 48 tokens and 64 decoded ones are three blocks of 32, not three and a half."""
    cache = KVCacheSettings(capacity_pages=16, block_size=32)
    outputs, events = run(Engine(EngineSettings(cache=cache)), "a", Prompt(tokens(48), max_tokens=64))
    assert [len(event.block_hashes) for event in events] == [1, 1, 1]
    assert events[2].parent_block_hash == events[1].block_hashes[0]
    decoded = [token for output in outputs for token in output.token_ids]
    assert list(events[1].token_ids) == [*tokens(16, 32), *decoded[:16]]


def test_reset_is_told_in_front_of_the_next_step() -> None:
    one = engine()
    one.submit("a", Prompt(tokens(8)))
    one.step()
    assert not one.reset_prefix_cache()
    while not one.is_idle:
        one.step()
    assert one.reset_prefix_cache()
    assert one.step() is None
    _, events = run(one, "b", Prompt(tokens(8), max_tokens=1))
    assert [type(event) for event in events] == [Cleared, Stored]


def test_evictions_are_in_front_of_what_they_make_room_for() -> None:
    one = engine(pages=3)
    run(one, "a", Prompt(tokens(12), max_tokens=1))
    _, events = run(one, "b", Prompt(tokens(8, 100), max_tokens=1))
    assert [type(event) for event in events] == [Removed, Removed, Stored]
    assert cached(one, tokens(12)) == 4


def test_full_report_states_what_it_reuses() -> None:
    one = engine()
    run(one, "a", Prompt(tokens(8), max_tokens=1))
    outputs, events = run(one, "b", Prompt(tokens(9), max_tokens=1, full_report=True))
    assert outputs[0].cached_tokens == 8
    assert [len(event.block_hashes) for event in events] == [2]


def test_long_prompt_is_computed_in_chunks_of_the_token_budget() -> None:
    one = engine(step_tokens_max=6)
    one.submit("a", Prompt(tokens(14), max_tokens=1))
    steps = [one.step() for _ in range(3)]
    assert [len(step.outputs) for step in steps if step] == [0, 0, 1]
    assert [
        sum(len(e.block_hashes) for e in step.events if isinstance(e, Stored)) for step in steps if step
    ] == [
        1,
        2,
        0,
    ]


def test_step_time_is_the_sum_of_what_was_done() -> None:
    time = TimeModel(step_s=1.0, prefill_s_per_token=0.1, decode_s_per_sequence=0.01, load_s_per_token=0.0)
    one = engine(time=time)
    one.submit("a", Prompt(tokens(10), max_tokens=3))
    one.submit("b", Prompt(tokens(10), max_tokens=3))
    first, second = one.step(), one.step()
    assert first is not None
    assert second is not None
    # b finds two blocks of a, which was admitted just before it.
    assert first.duration_s == pytest.approx(1.0 + 0.1 * (10 + 2))
    assert second.duration_s == pytest.approx(1.0 + 0.01 * 2)


def test_youngest_request_is_preempted_and_still_finishes() -> None:
    one = engine(pages=5)
    one.submit("a", Prompt(tokens(7), max_tokens=12))
    one.submit("b", Prompt(tokens(7, 100), max_tokens=12))
    outputs: list[Output] = []
    while not one.is_idle:
        step = one.step()
        assert step is not None
        outputs += step.outputs
    for name in "ab":
        assert sum(len(o.token_ids) for o in outputs if o.request == name) == 12
        assert {o.cached_tokens for o in outputs if o.request == name} == {0}
    assert one.stats().preemptions > 0
    assert one.stats().finished == 2
    assert one.cache.stats().pages_allocated == 0


def test_drafts_give_several_tokens_a_step_and_the_same_text() -> None:
    plain, _ = run(engine(), "a", Prompt(tokens(5), max_tokens=20))
    drafted, events = run(engine(draft_tokens=3), "a", Prompt(tokens(5), max_tokens=20))
    texts = [[token for output in outputs for token in output.token_ids] for outputs in (plain, drafted)]
    assert texts[0] == texts[1]
    assert len(drafted) < len(plain)
    stored = [token for event in events for token in event.token_ids]
    assert stored == [*tokens(5), *texts[0]][: len(stored)]
    assert len(stored) == (5 + 19) // BLOCK * BLOCK


def test_offload_brings_back_what_the_gpu_lost() -> None:
    one = engine(pages=4, offload=OffloadSettings(chunk_tokens=8))
    _, events = run(one, "a", Prompt(tokens(16), max_tokens=1))
    assert [event.medium for event in events] == ["GPU", "CPU", "CPU"]
    run(one, "b", Prompt(tokens(16, 100), max_tokens=1))
    assert one.cache.lookup(tokens(16)) == 0
    outputs, events = run(one, "c", Prompt(tokens(16), max_tokens=1))
    # Both chunks are there, but the last token has to be computed, and with it its block.
    assert outputs[0].cached_tokens == 12
    assert [type(event) for event in events] == [Removed] * 4 + [Stored]
    assert one.stats().offload_hit_tokens == 12


def test_refusals() -> None:
    one = engine(pages=4, waiting_max=1)
    with pytest.raises(LimitExceeded, match="5 pages of 4"):
        one.submit("a", Prompt(tokens(16), max_tokens=2))
    with pytest.raises(InvalidInput, match="at least one token"):
        one.submit("a", Prompt([]))
    with pytest.raises(InvalidInput, match="token ids"):
        one.submit("a", Prompt([1, -1]))
    with pytest.raises(InvalidInput, match="max_tokens"):
        one.submit("a", Prompt(tokens(1), max_tokens=0))
    one.submit("a", Prompt(tokens(4), max_tokens=1))
    with pytest.raises(Overloaded, match="waiting_max"):
        one.submit("b", Prompt(tokens(4), max_tokens=1))
    assert one.abort("a")
    assert not one.abort("a")
    assert one.is_idle


@pytest.mark.parametrize("seed", range(12))
def test_any_load_ends_with_every_page_returned(seed: int) -> None:
    draw = random.Random(seed)
    one = engine(
        pages=draw.choice([8, 12, 30]),
        running_max=draw.choice([2, 8]),
        step_tokens_max=draw.choice([3, 7, 100]),
        draft_tokens=draw.choice([0, 0, 2]),
        offload=OffloadSettings(chunk_tokens=8, capacity_chunks=5) if seed % 2 else None,
    )
    asked: dict[str, int] = {}
    got: dict[str, int] = {}
    for number in range(150):
        name, length = f"r{number}", draw.randint(1, 20)
        prompt = Prompt([draw.randrange(3), *tokens(length)], max_tokens=draw.randint(1, 8))
        one.submit(name, prompt)
        asked[name] = prompt.max_tokens
        if draw.random() < 0.05 and one.abort(name):
            del asked[name]
        for _ in range(draw.randrange(4)):
            step = one.step()
            for output in step.outputs if step else ():
                got[output.request] = got.get(output.request, 0) + len(output.token_ids)
    while step := one.step():
        for output in step.outputs:
            got[output.request] = got.get(output.request, 0) + len(output.token_ids)
    assert got == asked
    assert one.cache.stats().page_references == 0
    assert one.cache.stats().pages_free == one.settings.cache.capacity_pages
