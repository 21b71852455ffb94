"""POST /v1/fuzzy-match: what of a prompt is held, wherever it stands, and by whom."""

from __future__ import annotations

import array
import asyncio
import itertools
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from app.hashing import prefix_hashes
from app.service.fuzzy_queries import FuzzyQuery
from tests.api.conftest import CLEARED, Indexer, removed, stored

A, B, C = [list(range(first, first + 16)) for first in (100, 200, 300)]
NEAR_B = [*B[:15], 999]  # one token of 16 differs: within 8 bits for these


def joined(blocks: Sequence[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(blocks))


def hash_of(*blocks: list[int]) -> int:
    """The prefix hash of the last of the blocks."""
    packed = prefix_hashes("m", None, 16, array.array("I", joined(blocks)).tobytes(), None)
    return array.array("Q", packed)[-1]


def hold(indexer: Indexer, names: list[int], *blocks: list[int], pod: str = "pod-a", **fields: Any) -> None:
    event = stored(names, joined(blocks), block_size=16, **fields)
    response = indexer.events(event, pod=pod)
    assert response.status_code == 200, response.text


def ask(indexer: Indexer, *blocks: list[int], **fields: Any) -> dict[str, Any]:
    response = indexer.post("/v1/fuzzy-match", {"model": "m", "token_ids": joined(blocks), **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def found(answer: dict[str, Any]) -> list[tuple[int, str, list[str]]]:
    return [(b["token_offset"], b["kind"], [m["pod"] for m in b["matches"]]) for b in answer["blocks"]]


def test_a_block_is_found_behind_another_prefix(indexer: Indexer) -> None:
    hold(indexer, [1, 2], A, B)
    assert ask(indexer, C, B) == {
        "model": "m",
        "lora": None,
        "block_size": 16,
        "tokens": 32,
        "blocks": [
            {
                "block_index": 1,
                "token_offset": 16,
                "kind": "exact",
                "matches": [
                    {
                        "pod": "pod-a",
                        "dp_rank": 0,
                        "owners": [],
                        "cached_block_hash": hash_of(A, B),
                        "hamming_distance": 0,
                        "confidence": 1.0,
                        "kind": "exact",
                    }
                ],
            }
        ],
        "runs": [{"token_offset": 16, "tokens": 16, "kind": "exact"}],
        "pods": [
            {
                "pod": "pod-a",
                "reusable_blocks": 1,
                "reusable_tokens": 16,
                "coverage": 0.5,
                "mean_confidence": 1.0,
            }
        ],
        "owners": [],
        "shared_prefix_hash": f"{hash_of(C):016x}",
    }


def test_near_blocks_are_found_within_the_distance(indexer: Indexer) -> None:
    hold(indexer, [1, 2], A, B)
    [block] = ask(indexer, C, NEAR_B)["blocks"]
    [match] = block["matches"]
    distance = match["hamming_distance"]
    assert block["kind"] == match["kind"] == "near"
    assert 0 < distance <= 8
    assert match["confidence"] == 1 - distance / 64
    assert ask(indexer, C, NEAR_B, max_distance=distance)["blocks"]
    assert not ask(indexer, C, NEAR_B, max_distance=distance - 1)["blocks"]


def test_only_sliding_finds_what_is_off_the_grid(indexer: Indexer) -> None:
    hold(indexer, [1, 2], A, B)
    before, behind = C[:8], C[8:]
    assert ask(indexer, before, B, behind)["blocks"] == []
    answer = ask(indexer, before, B, behind, mode="sliding")
    assert found(answer) == [(8, "exact", ["pod-a"])]
    assert answer["blocks"][0]["block_index"] is None


def test_excluded_owners_do_not_count_and_take_no_place(indexer: Indexer) -> None:
    for pod in ("agent1", "agent1:system", "agent10"):
        hold(indexer, [1], A, pod=pod)
    assert found(ask(indexer, A)) == [(0, "exact", ["agent1", "agent10", "agent1:system"])]
    assert found(ask(indexer, A, limit_per_block=1)) == [(0, "exact", ["agent1"])]
    assert found(ask(indexer, A, limit_per_block=1, exclude=["agent1"])) == [(0, "exact", ["agent10"])]
    answer = ask(indexer, A, exclude=["agent1", "agent10"])
    assert (answer["blocks"], answer["pods"]) == ([], [])


def test_whoever_holds_it_no_more_is_not_named(indexer: Indexer) -> None:
    for pod in ("a", "b", "c", "d"):
        hold(indexer, [1], A, pod=pod)
    assert found(ask(indexer, A)) == [(0, "exact", ["a", "b", "c", "d"])]
    indexer.events(removed(1), pod="a")
    assert found(ask(indexer, A)) == [(0, "exact", ["b", "c", "d"])]
    indexer.events(CLEARED, pod="b")  # and not swept
    assert found(ask(indexer, A)) == [(0, "exact", ["c", "d"])]
    indexer.request("DELETE", "/v1/pods/c")
    assert found(ask(indexer, A)) == [(0, "exact", ["d"])]
    indexer.clock.now_s += indexer.settings.ttl_s
    assert found(ask(indexer, A)) == []


def test_salted_prompts_are_nobodys_business(indexer: Indexer) -> None:
    """Neither the block that has the salt, nor those that stand on it: in one event, in two, and the wrong way round."""
    hold(indexer, [1, 2], A, B, extra_keys=[["tenant-7"], None])
    hold(indexer, [3], C, parent=2)
    hold(indexer, [11], C, parent=10, pod="pod-b")
    hold(indexer, [10], A, extra_keys=[["tenant-7"]], pod="pod-b")
    for block in (A, B, C):
        assert ask(indexer, block)["blocks"] == []
    hold(indexer, [1], C, pod="pod-c")
    assert found(ask(indexer, C)) == [(0, "exact", ["pod-c"])]


def test_an_orphan_is_found_when_its_parent_has_come(indexer: Indexer) -> None:
    hold(indexer, [2], B, parent=1)
    assert ask(indexer, B)["blocks"] == []
    hold(indexer, [1], A)
    assert found(ask(indexer, B)) == [(0, "exact", ["pod-a"])]


def test_models_and_adapters_are_kept_apart(indexer: Indexer) -> None:
    hold(indexer, [1], A)
    hold(indexer, [2], B, lora_name="tuned")
    assert ask(indexer, B)["blocks"] == []
    assert found(ask(indexer, B, lora="tuned")) == [(0, "exact", ["pod-a"])]
    assert ask(indexer, A, model="other")["blocks"] == []


def test_the_smallest_block_size_answers_unless_another_is_asked_for(indexer: Indexer) -> None:
    hold(indexer, [1], A)
    chunk = stored([1], A + B, block_size=32, medium="CPU")
    assert indexer.events(chunk).status_code == 200
    assert ask(indexer, A, B)["block_size"] == 16
    answer = ask(indexer, A, B, block_size=32)
    assert answer["block_size"] == 32
    assert found(answer) == [(0, "exact", ["pod-a"])]


def test_a_prompt_that_fills_no_block_has_no_answer(indexer: Indexer) -> None:
    hold(indexer, [1], A)
    for mode in ("grid", "sliding"):
        for prompt in ([], A[:15]):
            answer = ask(indexer, prompt, mode=mode)
            assert (answer["blocks"], answer["shared_prefix_hash"]) == ([], None)


def test_switched_off(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(fuzzy=False)
    hold(indexer, [1], A)
    response = indexer.post("/v1/fuzzy-match", {"model": "m", "token_ids": A})
    assert response.status_code == 501
    assert response.json()["type"].endswith("switched-off")
    assert "KVINDEXER_FUZZY" in response.json()["detail"]
    assert indexer.depths(A) == {"pod-a": 1}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "model"),
        ({"model": "m"}, "token_ids"),
        ({"model": "m", "token_ids": [1], "text": "a"}, "token_ids"),
        ({"model": "m", "token_ids": [1], "max_distance": 9}, "max_distance"),
        ({"model": "m", "token_ids": [1], "mode": "round"}, "mode"),
        ({"model": "m", "token_ids": [1], "limit_per_block": 0}, "limit_per_block"),
        ({"model": "m", "token_ids": [1], "exclude": ["a"] * 1_025}, "exclude"),
        ({"model": "m", "token_ids": [-1]}, "token_ids[0]"),
        ({"model": "m", "token_ids": [1], "cache_salt": "s"}, "cache_salt"),
    ],
)
def test_what_cannot_be(indexer: Indexer, body: dict[str, Any], field: str) -> None:
    response = indexer.post("/v1/fuzzy-match", body)
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == field


def test_the_length_of_a_prompt_is_bounded(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(fuzzy_tokens_max=16)
    assert ask(indexer, A)["tokens"] == 16
    response = indexer.post("/v1/fuzzy-match", {"model": "m", "token_ids": [*A, 1]})
    assert response.status_code == 422
    assert response.json()["bound"] == "fuzzy_tokens_max"


def test_candidates_are_bounded_and_counted(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(fuzzy_candidates_max=2)
    for number in range(4):  # one content behind four prefixes
        first = [number] * 16
        hold(indexer, [2 * number, 2 * number + 1], first, C)
    [block] = ask(indexer, C, limit_per_block=256)["blocks"]
    assert len(block["matches"]) == 1  # of one owner the best only
    said = indexer.get("/metrics").text
    assert "kvindexer_fuzzy_candidates_dropped_total 1.0" in said
    assert "kvindexer_fuzzy_queries_total 1.0" in said
    assert "kvindexer_fuzzy_blocks 8.0" in said
    assert "kvindexer_fuzzy_reusable_tokens_total 16.0" in said


def test_others_have_their_turn_while_a_fuzzy_match_runs(indexer: Indexer) -> None:
    """A match that is asked for behind it is answered before it, and sees what was stored in between."""
    chance = random.Random(1)
    hold(indexer, [1], A)
    prompt = [chance.randrange(1_000) for _ in range(8_000)]
    body = {"model": "m", "token_ids": [*prompt, *A], "mode": "sliding"}

    async def both() -> tuple[bool, int, dict[str, Any]]:
        fuzzy = asyncio.create_task(indexer.client.post("/v1/fuzzy-match", json=body))
        for _ in range(1_000):
            if indexer.service.fuzzy.gauges()["asked"]:
                break
            await asyncio.sleep(0)
        event = stored([1, 2], A + B, block_size=16)
        await indexer.client.post("/v1/events", json={"pod": "pod-b", "model": "m", "events": [event]})
        match = await indexer.client.post("/v1/match", json={"model": "m", "token_ids": A + B})
        return fuzzy.done(), len(match.json()["matches"]), (await fuzzy).json()

    was_done, matches, answer = indexer.run(both())
    assert (was_done, matches) == (False, 2)
    assert answer["blocks"][-1]["token_offset"] == 8_000
    assert "pod-a" in [match["pod"] for match in answer["blocks"][-1]["matches"]]
    assert indexer.service.fuzzy.gauges()["asked"] == 0


def test_one_question_is_under_way_at_a_time(indexer: Indexer) -> None:
    """A short one waits for a long one: what a question holds of windows and candidates is there once."""
    chance = random.Random(1)
    hold(indexer, [1], A)
    ended: list[int] = []

    async def ask(tokens: list[int]) -> None:
        asked = struct.pack(f"<{len(tokens)}I", *tokens)
        await indexer.service.fuzzy.ask(FuzzyQuery(model="m", token_ids=asked, mode="sliding"))
        ended.append(len(tokens))

    async def both() -> None:
        await asyncio.gather(ask([chance.randrange(1_000) for _ in range(8_000)]), ask(A))

    indexer.run(both())
    assert ended == [8_000, len(A)]


def test_questions_wait_in_a_line_of_bounded_length(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(fuzzy_queue_max=2)
    hold(indexer, [1], A)
    body = {"model": "m", "token_ids": A * 200, "mode": "sliding"}

    async def three() -> list[int]:
        asked = [indexer.client.post("/v1/fuzzy-match", json=body) for _ in range(3)]
        return [response.status_code for response in await asyncio.gather(*asked)]

    assert sorted(indexer.run(three())) == [200, 200, 503]
    assert "kvindexer_fuzzy_refused_total 1.0" in indexer.get("/metrics").text
    assert ask(indexer, A)["blocks"]
