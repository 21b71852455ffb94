"""Metadata of stored blocks comes back as hints of a match, as long as the block is there, on either way."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.api.conftest import CLEARED, Indexer, removed, stored

TOKENS = list(range(100, 116))  # four blocks
PLAN = {
    "anchor_hash": 2**64 - 1,
    "agent_id": "planner",
    "token_length": 16,
    "pre_rope": True,
    "cla_group": 2,
    "workflow_step": 3,
    "offset_hint": [0.5, 1.0],
}


def rows(indexer: Indexer, **fields: Any) -> list[dict[str, Any]]:
    response = indexer.post("/v1/match", {"model": "m", "token_ids": TOKENS, **fields})
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["matches"]
    return found


def hints(indexer: Indexer, **fields: Any) -> Any:
    (row,) = rows(indexer, **fields)
    return row["hints"]


def hint(block: int, tokens: int, metadata: dict[str, Any], tier: str = "gpu") -> dict[str, Any]:
    return {"block": block, "tier": tier, "tokens": tokens, "metadata": metadata}


@pytest.fixture
def hinted(indexer: Indexer) -> Indexer:
    indexer.events(stored([1, 2], TOKENS[:8], metadata=PLAN))
    return indexer


def test_metadata_comes_back_with_its_block(hinted: Indexer) -> None:
    assert hints(hinted) == [hint(2, 8, PLAN)]
    assert hints(hinted, token_ids=TOKENS[:8]) == [hint(2, 8, PLAN)]
    assert hints(hinted, token_ids=TOKENS[:4]) is None  # the hinted block is not of this prompt


def test_every_notation_asks_and_tells_alike(indexer: Indexer) -> None:
    payload = msgspec.msgpack.encode([1.0, [stored([1, 2], TOKENS[:8], metadata=PLAN)], 0])
    told = indexer.post(
        "/v1/events?pod=pod-a&model=m", content=payload, headers={"content-type": "application/msgpack"}
    )
    assert told.json()["accepted"] == 1
    assert hints(indexer) == [hint(2, 8, PLAN)]
    octets = indexer.post(
        "/v1/match?model=m",
        content=struct.pack("<16I", *TOKENS),
        headers={"content-type": "application/octet-stream"},
    )
    packed = indexer.post(
        "/v1/match", {"model": "m", "token_ids": TOKENS}, headers={"accept": "application/msgpack"}
    )
    hashes = indexer.post("/v1/hashes", {"model": "m", "token_ids": TOKENS}).json()["prefix_hashes"]
    by_hashes = indexer.post("/v1/match", {"model": "m", "prefix_hashes": hashes})
    for answer in (octets.json(), msgspec.msgpack.decode(packed.content), by_hashes.json()):
        assert answer["matches"][0]["hints"] == [hint(2, 8, PLAN)]


def test_answers_are_equal_with_and_without_hints_around(make_indexer: Callable[..., Indexer]) -> None:
    """A hint elsewhere changes nothing of an answer, and counts of queries do not depend on the way."""
    for others in (False, True):
        indexer = make_indexer()
        if others:
            indexer.events(stored([9], [7, 7, 7, 7], metadata=PLAN), pod="pod-z")
        indexer.events(stored([1, 2], TOKENS[:8]))
        assert hints(indexer) is None
        indexer.events(stored([3], TOKENS[8:12], parent=2, metadata={}))
        assert hints(indexer) == [hint(3, 12, {})]
        counted = indexer.service.stats()["queries"]
        assert (counted["matches"], counted["matches_hit"]) == (2, 2)


def test_a_pod_that_is_not_asked_for_brings_no_hints(hinted: Indexer) -> None:
    hinted.events(stored([1, 2], TOKENS[:8]), pod="pod-b")
    assert hints(hinted, pods=["pod-b"]) is None
    assert {row["pod"]: row["hints"] for row in rows(hinted)} == {
        "pod-a": [hint(2, 8, PLAN)],
        "pod-b": None,
    }


def test_longest_prefixes_first_and_at_most_so_many(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(row_hints_max=2)
    for block in range(4):
        parent = block if block else None
        tokens = TOKENS[4 * block : 4 * block + 4]
        indexer.events(stored([block + 1], tokens, parent=parent, metadata={"step": block}))
    assert hints(indexer) == [hint(4, 16, {"step": 3}), hint(3, 12, {"step": 2})]
    assert "kvindexer_hints_cut_total 2.0" in indexer.get("/metrics").text


def test_what_lies_behind_a_hole_is_of_no_use(hinted: Indexer) -> None:
    hinted.events(removed(1))
    assert rows(hinted) == []
    hinted.events(stored([1], TOKENS[:4]))
    assert hints(hinted) == [hint(2, 8, PLAN)]


# -- the block's life


def test_removed_and_stored_again_without_metadata(hinted: Indexer) -> None:
    hinted.events(removed(2))
    assert hints(hinted) is None
    hinted.events(stored([2], TOKENS[4:8], parent=1))
    assert hints(hinted) is None


def test_a_further_copy_keeps_it_and_the_last_one_takes_it(hinted: Indexer) -> None:
    hinted.events(stored([2], TOKENS[4:8], parent=1))
    hinted.events(removed(2))
    assert hints(hinted) == [hint(2, 8, PLAN)]
    hinted.events(removed(2))
    assert hints(hinted) is None


def test_newest_metadata_counts(hinted: Indexer) -> None:
    hinted.events(stored([2], TOKENS[4:8], parent=1, metadata={"agent_id": "other"}))
    assert hints(hinted) == [hint(2, 8, {"agent_id": "other"})]


@pytest.mark.parametrize("clear", ["event", "route", "restart"])
def test_cleared(indexer: Indexer, clear: str) -> None:
    indexer.events(stored([1, 2], TOKENS[:8], metadata=PLAN), seq=0)
    match clear:
        case "event":
            indexer.events(CLEARED, seq=1)
        case "route":
            indexer.request("DELETE", "/v1/pods/pod-a/blocks")
        case _:
            indexer.events(stored([9], [1, 2, 3, 4]), seq=0)
    assert rows(indexer) == []
    indexer.events(stored([1, 2], TOKENS[:8]))
    assert hints(indexer) is None


def test_dropped_with_its_pod(hinted: Indexer) -> None:
    hinted.request("DELETE", "/v1/pods/pod-a")
    hinted.service.tick()
    assert hinted.service.hints.is_empty
    hinted.events(stored([1, 2], TOKENS[:8]))
    assert hints(hinted) is None


def test_expired(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(ttl_s=10)
    indexer.events(stored([1, 2], TOKENS[:8], metadata=PLAN))
    indexer.clock.now_s += 9
    assert hints(indexer) == [hint(2, 8, PLAN)]  # and a match refreshes it
    indexer.clock.now_s += 9
    assert hints(indexer) == [hint(2, 8, PLAN)]
    indexer.clock.now_s += 11
    indexer.service.tick()
    assert indexer.service.hints.is_empty
    indexer.events(stored([1, 2], TOKENS[:8]))
    assert hints(indexer) is None


def test_each_tier_has_its_own(hinted: Indexer) -> None:
    hinted.events(stored([1, 2], TOKENS[:8], medium="CPU", metadata={"chunk": 7}))
    both = [hint(2, 8, PLAN), hint(2, 8, {"chunk": 7}, tier="cpu")]
    assert hints(hinted) == both
    hinted.events(CLEARED)
    assert hints(hinted) == both[1:]


def test_a_block_that_waits_for_its_parent(indexer: Indexer) -> None:
    indexer.events(stored([2], TOKENS[4:8], parent=1, metadata=PLAN))
    indexer.service.tick()
    assert "kvindexer_hints_waiting 1.0" in indexer.get("/metrics").text
    indexer.events(stored([1], TOKENS[:4]))
    assert hints(indexer) == [hint(2, 8, PLAN)]
    assert "kvindexer_hints_waiting 0.0" in indexer.get("/metrics").text


def test_a_waiting_block_that_is_cleared_leaves_nothing(indexer: Indexer) -> None:
    indexer.events(stored([2], TOKENS[4:8], parent=1, metadata=PLAN))
    indexer.events(CLEARED)
    indexer.service.tick()
    assert indexer.service.hints.is_empty


def test_offloaded_chunks_beside_blocks(indexer: Indexer) -> None:
    indexer.events(stored([1, 2], TOKENS[:8]))
    indexer.events(stored([77], TOKENS[:8], block_size=8, medium="CPU", metadata=PLAN))
    assert hints(indexer) == [hint(77, 8, PLAN, tier="cpu")]


# -- bounds


def test_the_oldest_goes(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(hints_max=2)
    for block in range(3):
        indexer.events(stored([block + 1], [block] * 4, metadata={"n": block}))
    found = [hints(indexer, token_ids=[block] * 5) for block in range(3)]
    assert found == [None, [hint(2, 4, {"n": 1})], [hint(3, 4, {"n": 2})]]
    assert "kvindexer_hints_evicted_total 1.0" in indexer.get("/metrics").text


@pytest.mark.parametrize(
    "metadata",
    [[1, 2], "text", 7, {"long": "x" * 1_100}, {"big": 2**70}],
    ids=["array", "text", "number", "long", "too big"],
)
def test_what_is_no_hint_is_counted_and_its_block_kept(indexer: Indexer, metadata: Any) -> None:
    body = json.dumps({"pod": "pod-a", "model": "m", "events": [stored([1], TOKENS[:4], metadata=metadata)]})
    response = indexer.post("/v1/events", content=body, headers={"content-type": "application/json"})
    assert response.json()["stored_blocks"] == 1
    assert hints(indexer) is None
    assert "kvindexer_hints_refused_total 1.0" in indexer.get("/metrics").text


def test_arrays_in_metadata_are_told_as_they_came(indexer: Indexer) -> None:
    said = {"token_ids": [1, 2], "offset_hint": [1, 2.5], "nested": {"block_hashes": [3]}}
    indexer.events(stored([1], TOKENS[:4], metadata=said))
    assert hints(indexer) == [hint(1, 4, said)]


def test_switched_off(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(hints_max=0)
    indexer.events(stored([1], TOKENS[:4], metadata=PLAN))
    assert hints(indexer) is None
    text = indexer.get("/metrics").text
    assert "kvindexer_hints_stored_total 0.0" in text
    assert "kvindexer_hints_refused_total 0.0" in text


# -- elsewhere


def test_a_dump_has_them(hinted: Indexer, make_indexer: Callable[..., Indexer]) -> None:
    lines = hinted.get("/v1/dump").text.splitlines()
    other = make_indexer()
    for line in lines:
        response = other.post("/v1/events", content=line, headers={"content-type": "application/json"})
        assert response.status_code == 200, response.text
    assert hints(other) == [hint(2, 8, PLAN)]


def test_route_and_batch_have_them(hinted: Indexer) -> None:
    (found,) = hinted.post("/v1/match/batch", {"queries": [{"model": "m", "token_ids": TOKENS}]}).json()[
        "results"
    ]
    assert found["matches"][0]["hints"] == [hint(2, 8, PLAN)]
    routed = hinted.post("/v1/route", {"model": "m", "token_ids": TOKENS}).json()
    assert (routed["pod"], routed["hints"]) == ("pod-a", [hint(2, 8, PLAN)])
