"""Match queries in every notation, and what they answer."""

from __future__ import annotations

import array
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from app.index.prefix_index import IndexLimits
from app.schemas.match import MatchResponse
from tests.api.conftest import Indexer, stored
from tests.reference import ReferenceIndex

TOKENS = list(range(100, 118))  # four blocks of four and a part of a fifth
OCTETS = {"content-type": "application/octet-stream"}
MSGPACK = {"content-type": "application/msgpack", "accept": "application/msgpack"}


@pytest.fixture
def filled(indexer: Indexer) -> Indexer:
    """pod-a holds four blocks, the last of them on the CPU only; pod-b two; pod-c something else."""
    indexer.events(stored([1, 2, 3], TOKENS[:12]), stored([4], TOKENS[12:16], parent=3, medium="CPU"))
    indexer.events(stored([1, 2], TOKENS[:8]), pod="pod-b")
    indexer.events(stored([1, 2], TOKENS[8:16]), pod="pod-c")
    return indexer


def ask(indexer: Indexer, **fields: Any) -> Any:
    response = indexer.post("/v1/match", {"model": "m", **fields})
    assert response.status_code == 200, response.text
    MatchResponse.model_validate(response.json(), strict=True)
    return response.json()


def test_whole_answer(filled: Indexer) -> None:
    answer = ask(filled, token_ids=TOKENS, pods=["pod-a", "pod-c", "pod-x"])
    (row,) = answer.pop("matches")
    assert answer == {
        "model": "m",
        "lora": None,
        "block_size": 4,
        "tokens": 18,
        "blocks": 4,
        "prefix_hashes": None,
    }
    assert row.pop("tiers").items() >= {"gpu": 3, "cpu": 4}.items()
    assert row == {
        "pod": "pod-a",
        "dp_rank": 0,
        "matched_blocks": 4,
        "matched_tokens": 16,
        "reusable_tokens": 16,
        "percent": 100.0,
        "speculative_blocks": 4,
        "state": "live",
        "last_event_age_s": 0.0,
        "hints": None,
    }


def test_best_first_and_without_those_that_hold_nothing(filled: Indexer) -> None:
    assert [row["pod"] for row in ask(filled, token_ids=TOKENS)["matches"]] == ["pod-a", "pod-b"]


def test_engine_recomputes_the_last_token(filled: Indexer) -> None:
    (row,) = ask(filled, token_ids=TOKENS[:16], pods=["pod-a"])["matches"]
    assert (row["matched_tokens"], row["reusable_tokens"]) == (16, 12)


def test_age_of_the_last_event(filled: Indexer) -> None:
    filled.clock.now_s += 2.5
    assert ask(filled, token_ids=TOKENS)["matches"][0]["last_event_age_s"] == pytest.approx(2.5)


@pytest.mark.parametrize("token_ids", [[], [1], TOKENS[1:]])
def test_no_match_is_an_answer(filled: Indexer, token_ids: list[int]) -> None:
    answer = ask(filled, token_ids=token_ids)
    assert answer["matches"] == []
    assert answer["tokens"] == len(token_ids)


def test_unknown_model_is_an_answer(indexer: Indexer) -> None:
    assert ask(indexer, token_ids=TOKENS)["matches"] == []


def test_hashes_are_those_of_the_reference(filled: Indexer) -> None:
    answer = ask(filled, token_ids=TOKENS, include_hashes=True)
    packed = struct.pack(f"<{len(TOKENS)}I", *TOKENS)
    expected = array.array(
        "Q", ReferenceIndex(IndexLimits()).prefix_hashes("m", None, 4, packed, None)
    ).tolist()
    assert answer["prefix_hashes"] == expected
    made = filled.post("/v1/hashes", {"model": "m", "token_ids": TOKENS}).json()
    assert made == {"prefix_hashes": expected}


def test_hashes_in_the_place_of_tokens(filled: Indexer) -> None:
    hashes = filled.post("/v1/hashes", {"model": "m", "token_ids": TOKENS}).json()["prefix_hashes"]
    by_hash = ask(filled, prefix_hashes=hashes)
    by_token = ask(filled, token_ids=TOKENS)
    depths = [[row["matched_blocks"] for row in answer["matches"]] for answer in (by_hash, by_token)]
    assert depths[0] == depths[1] == [4, 2]
    assert by_hash["blocks"] == 4


def test_octets(filled: Indexer) -> None:
    packed = struct.pack(f"<{len(TOKENS)}I", *TOKENS)
    asked = {"model": "m", "pods": "pod-a,pod-c"}
    response = filled.post("/v1/match", content=packed, params=asked, headers=OCTETS)
    assert response.status_code == 200, response.text
    assert response.json() == ask(filled, token_ids=TOKENS, pods=["pod-a", "pod-c"])


def test_msgpack_both_ways(filled: Indexer) -> None:
    body = msgspec.msgpack.encode({"model": "m", "token_ids": TOKENS, "pods": None})
    response = filled.post("/v1/match", content=body, headers=MSGPACK)
    assert response.headers["content-type"] == "application/msgpack"
    assert msgspec.msgpack.decode(response.content) == ask(filled, token_ids=TOKENS)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("*/*", "application/json"),
        ("text/html", "application/json"),
        ("application/msgpack", "application/msgpack"),
        ("application/x-msgpack, */*", "application/msgpack"),
        ("application/json, application/msgpack;q=0.5", "application/json"),
        ("application/json;q=0.5, application/msgpack", "application/msgpack"),
        ("application/msgpack;q=oops", "application/json"),
    ],
)
def test_accept(filled: Indexer, accept: str, expected: str) -> None:
    response = filled.post("/v1/match", {"model": "m", "token_ids": TOKENS}, headers={"accept": accept})
    assert response.headers["content-type"] == expected


def test_salt_is_a_world_of_its_own(filled: Indexer) -> None:
    filled.events(stored([1, 2], TOKENS[:8], extra_keys=[["tenant"], None]), pod="pod-s")
    assert filled.depths(TOKENS, cache_salt="tenant") == {"pod-s": 2}
    assert filled.depths(TOKENS, extra_keys=[["tenant"]]) == {"pod-s": 2}
    assert "pod-s" not in filled.depths(TOKENS)
    assert filled.depths(TOKENS, cache_salt="other") == {}
    octets = struct.pack("<8I", *TOKENS[:8])
    query = {"model": "m", "cache_salt": "tenant"}
    answer = filled.post("/v1/match", content=octets, params=query, headers=OCTETS).json()
    assert [row["pod"] for row in answer["matches"]] == ["pod-s"]


def test_block_size_of_the_query(filled: Indexer) -> None:
    filled.events(stored([1], TOKENS[:8], block_size=8), pod="pod-8")
    assert filled.depths(TOKENS, block_size=8) == {"pod-8": 1}


def test_announced_blocks_are_seen_apart(filled: Indexer) -> None:
    body = {"model": "m", "pod": "pod-b", "token_ids": TOKENS, "ttl_s": 2.0}
    assert filled.post("/v1/prefixes", body).json() == {"added": 2}
    (row,) = ask(filled, token_ids=TOKENS, pods=["pod-b"])["matches"]
    assert (row["matched_blocks"], row["speculative_blocks"]) == (2, 4)
    filled.clock.now_s += 2.1
    (row,) = ask(filled, token_ids=TOKENS, pods=["pod-b"])["matches"]
    assert (row["matched_blocks"], row["speculative_blocks"]) == (2, 2)


def test_announcement_by_hash(filled: Indexer) -> None:
    hashes = filled.post("/v1/hashes", {"model": "m", "token_ids": TOKENS}).json()["prefix_hashes"]
    body = {"model": "m", "pod": "pod-c", "prefix_hashes": hashes}
    assert filled.post("/v1/prefixes", body).json() == {"added": 4}


def test_announcement_for_an_unknown_pod(filled: Indexer) -> None:
    response = filled.post("/v1/prefixes", {"model": "m", "pod": "pod-z", "token_ids": TOKENS})
    assert response.status_code == 404


def test_announcement_that_lives_too_long(filled: Indexer) -> None:
    body = {"model": "m", "pod": "pod-a", "token_ids": TOKENS, "ttl_s": 1e6}
    response = filled.post("/v1/prefixes", body)
    assert (response.status_code, response.json()["bound"]) == (422, "speculative_ttl_s_max")


def test_tokens_bound(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(tokens_max=4)
    for fields in ({"token_ids": [1] * 5}, {"prefix_hashes": [1] * 5}):
        response = indexer.post("/v1/match", {"model": "m", **fields})
        assert (response.status_code, response.json()["bound"]) == (422, "tokens_max")
    response = indexer.post("/v1/match", content=b"\0" * 20, params={"model": "m"}, headers=OCTETS)
    assert (response.status_code, response.json()["bound"]) == (422, "tokens_max")
    assert indexer.post("/v1/match", {"model": "m", "token_ids": [1] * 4}).status_code == 200
