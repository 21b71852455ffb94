"""The choice over HTTP, batches, and the filters of a match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from app.schemas.match import BatchResponse
from app.schemas.pods import PodResponse
from app.schemas.problems import Problem
from app.schemas.route import RouteResponse
from tests.api.conftest import Indexer, stored

TOKENS = list(range(100, 118))  # four blocks of four and a part of a fifth


@pytest.fixture
def filled(indexer: Indexer) -> Indexer:
    """pod-a holds four blocks, pod-b two, pod-c none."""
    indexer.events(stored([1, 2, 3, 4], TOKENS[:16]), pod="pod-a")
    indexer.events(stored([1, 2], TOKENS[:8]), pod="pod-b")
    indexer.events(stored([1], TOKENS[4:8]), pod="pod-c")
    return indexer


def choose(indexer: Indexer, **fields: Any) -> Any:
    response = indexer.post("/v1/route", {"model": "m", "token_ids": TOKENS, **fields})
    assert response.status_code == 200, response.text
    RouteResponse.model_validate(response.json(), strict=True)
    return response.json()


def test_whole_answer(filled: Indexer) -> None:
    answer = choose(filled, pods=["pod-a"], loads={"pod-a": {"running": 1}}, include_hashes=True)
    (hashes,) = [answer.pop("prefix_hashes")]
    assert hashes == filled.post("/v1/hashes", {"model": "m", "token_ids": TOKENS}).json()["prefix_hashes"]
    (row,) = answer.pop("candidates")
    assert answer.pop("score") == row.pop("score") == pytest.approx(1 - (2 + 18 / 16) / 18)
    assert answer == {
        "pod": "pod-a",
        "dp_rank": 0,
        "policy": "prefix_and_load",
        "model": "m",
        "lora": None,
        "block_size": 4,
        "tokens": 18,
        "blocks": 4,
        "reserved_blocks": 0,
        "hints": None,
    }
    assert row == {
        "pod": "pod-a",
        "dp_rank": 0,
        "matched_blocks": 4,
        "speculative_blocks": 4,
        "load": {"running": 1, "waiting": 0, "kv_usage": 0},
        "own_requests": 0,
        "state": "live",
        "reason": "holds 16 of 18 tokens, 1 running, 0 waiting, 0 % of its KV in use",
    }


def test_policies(filled: Indexer) -> None:
    loads = {"pod-a": {"running": 90}, "pod-b": {"running": 1}, "pod-c": {"waiting": 3}}
    assert choose(filled, loads=loads, policy="longest_prefix")["pod"] == "pod-a"
    assert choose(filled, loads=loads, policy="least_loaded")["pod"] == "pod-b"
    assert choose(filled, loads=loads)["pod"] == "pod-b"


def test_round_robin_goes_round(filled: Indexer) -> None:
    chosen = [choose(filled, policy="round_robin")["pod"] for _ in range(6)]
    assert chosen == ["pod-a", "pod-b", "pod-c"] * 2


def test_reservation_is_seen_by_the_next(filled: Indexer) -> None:
    other = list(range(500, 516))
    first = choose(filled, token_ids=other, reserve=True)
    assert first["reserved_blocks"] == 4
    second = choose(filled, token_ids=other)
    assert second["pod"] == first["pod"]
    assert second["candidates"][0]["speculative_blocks"] == 4
    filled.clock.now_s += 2.1
    assert choose(filled, token_ids=other)["candidates"][0]["speculative_blocks"] == 0


def test_a_dry_run_leaves_no_trace(filled: Indexer) -> None:
    expected = choose(filled)
    for _ in range(5):
        dry = choose(filled, dry_run=True, reserve=True, policy="round_robin")
        assert dry["reserved_blocks"] == 0
    again = choose(filled, dry_run=True)
    assert [row["own_requests"] for row in again["candidates"] if row["own_requests"]] == [1.0], "the first"
    assert again["candidates"][0]["speculative_blocks"] == expected["candidates"][0]["speculative_blocks"]
    assert "kvindexer_route_choices_round_robin_total 0.0" in filled.get("/metrics").text
    assert "kvindexer_index_speculative_blocks 0.0" in filled.get("/metrics").text


def test_by_hashes(filled: Indexer) -> None:
    hashes = filled.post("/v1/hashes", {"model": "m", "token_ids": TOKENS}).json()["prefix_hashes"]
    answer = choose(filled, token_ids=None, prefix_hashes=hashes, reserve=True)
    assert (answer["pod"], answer["blocks"], answer["reserved_blocks"]) == ("pod-a", 4, 0)


def test_what_is_shown(filled: Indexer) -> None:
    assert [row["pod"] for row in choose(filled)["candidates"]] == ["pod-a", "pod-b", "pod-c"]
    assert [row["pod"] for row in choose(filled, top_k=1)["candidates"]] == ["pod-a"]
    busy = {"pod-a": {"running": 99}, "pod-b": {"running": 99}}
    shown = choose(filled, min_blocks=3, loads=busy)
    assert shown["pod"] == "pod-c", "the choice is made of all"
    assert [row["pod"] for row in shown["candidates"]] == ["pod-c", "pod-a"]


@pytest.mark.parametrize("fields", [{"model": "n"}, {"pods": []}])
def test_nobody(filled: Indexer, fields: dict[str, Any]) -> None:
    response = filled.post("/v1/route", {"model": "m", "token_ids": TOKENS, **fields})
    assert response.status_code == 404
    assert response.json()["type"].endswith("no-candidate")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"policy": "random"}, "policy"),
        ({"loads": {"pod-a": {"running": -1}}}, "loads[...].running"),
        ({"loads": {"pod-a": {"kv_usage": 1.5}}}, "loads[...].kv_usage"),
        ({"loads": {"pod-a": {"speed": 1}}}, "loads[...]"),
        ({"loads": [1]}, "loads"),
        ({"reserve": "yes"}, "reserve"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"token_ids": None}, "token_ids"),
    ],
)
def test_refused(filled: Indexer, fields: dict[str, Any], field: str) -> None:
    before = filled.picture()
    response = filled.post("/v1/route", {"model": "m", "token_ids": TOKENS, **fields})
    assert response.status_code == 422, response.text
    assert response.json()["errors"][0]["field"] == field
    assert filled.picture() == before


def test_where_the_load_is_read(indexer: Indexer) -> None:
    spec = {"model": "m", "metrics_url": "http://127.0.0.1:1/metrics"}
    answer = indexer.request("PUT", "/v1/pods/pod-a", json=spec)
    PodResponse.model_validate(answer.json(), strict=True)
    assert answer.json()["metrics_url"] == spec["metrics_url"]
    indexer.events(stored([1], TOKENS[:4]))
    moved = indexer.request("PUT", "/v1/pods/pod-a", json={"model": "m"})
    assert moved.json()["metrics_url"] is None
    assert indexer.depths(TOKENS) == {"pod-a": 1}, "what the pod holds does not depend on it"


@pytest.mark.parametrize(
    "url", ["ftp://h/metrics", "http://", "h:8000", "http://h:99999/", "http://[::1", "http://h/a b"]
)
def test_where_no_load_can_be_read(indexer: Indexer, url: str) -> None:
    answer = indexer.request("PUT", "/v1/pods/pod-a", json={"model": "m", "metrics_url": url})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "metrics_url")
    assert indexer.service.pods == {}


# -- filters of a match


def match(indexer: Indexer, **fields: Any) -> list[tuple[str, int]]:
    response = indexer.post("/v1/match", {"model": "m", "token_ids": TOKENS, **fields})
    assert response.status_code == 200, response.text
    return [(row["pod"], row["matched_blocks"]) for row in response.json()["matches"]]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [("pod-a", 4), ("pod-b", 2)]),
        ({"min_blocks": 2}, [("pod-a", 4), ("pod-b", 2)]),
        ({"min_blocks": 3}, [("pod-a", 4)]),
        ({"min_blocks": 5}, []),
        ({"top_k": 1}, [("pod-a", 4)]),
        ({"top_k": 5}, [("pod-a", 4), ("pod-b", 2)]),
        ({"pods": ["pod-b", "pod-c"], "top_k": 1}, [("pod-b", 2)]),
    ],
)
def test_filters(filled: Indexer, fields: dict[str, Any], expected: list[tuple[str, int]]) -> None:
    assert match(filled, **fields) == expected
    octets = b"".join(token.to_bytes(4, "little") for token in TOKENS)
    query = {"model": "m", **{k: ",".join(v) if isinstance(v, list) else v for k, v in fields.items()}}
    headers = {"content-type": "application/octet-stream"}
    answer = filled.post("/v1/match", content=octets, params=query, headers=headers).json()
    assert [(row["pod"], row["matched_blocks"]) for row in answer["matches"]] == expected


def test_a_filter_hides_no_hit_from_the_figures(filled: Indexer) -> None:
    match(filled, min_blocks=5)
    assert filled.service.stats()["queries"]["matches_hit"] == 1


# -- batches


def test_batch_is_in_order_and_one_fault_is_its_own(filled: Indexer) -> None:
    queries: list[Any] = [
        {"model": "m", "token_ids": TOKENS},
        {"model": "m", "token_ids": [-1]},
        7,
        {"model": "m", "token_ids": TOKENS[:9], "top_k": 1},
        {"model": "m"},
    ]
    response = filled.post("/v1/match/batch", {"queries": queries})
    assert response.status_code == 200
    BatchResponse.model_validate(response.json(), strict=True)
    results = response.json()["results"]
    for place in (0, 3):
        assert results[place] == filled.post("/v1/match", queries[place]).json()
    assert [Problem.model_validate(results[place]).status for place in (1, 2, 4)] == [422] * 3
    assert results[1]["errors"][0]["field"] == "token_ids[0]"


@pytest.mark.parametrize("accept", ["application/json", "application/msgpack"])
def test_batch_answers_and_counts_what_single_queries_do(filled: Indexer, accept: str) -> None:
    tokens = {"model": "m", "token_ids": TOKENS}
    queries: list[Any] = [
        tokens,
        {**tokens, "include_hashes": True},
        {**tokens, "min_blocks": 2},
        {**tokens, "top_k": 1},
        {**tokens, "pods": ["pod-b", "nobody"]},
        {"model": "m", "prefix_hashes": [1, 2]},
        {"model": "nobody's", "token_ids": TOKENS},
        {"model": "m", "token_ids": []},
        {**tokens, "invented": 1},
    ]
    before = filled.service.stats()["queries"]["matches"]
    answer = filled.post("/v1/match/batch", {"queries": queries}, headers={"accept": accept})
    assert answer.headers["content-type"] == accept
    decode = msgspec.json.decode if accept == "application/json" else msgspec.msgpack.decode
    results = decode(answer.content)["results"]
    single = [filled.post("/v1/match", query).json() for query in queries]
    assert [{**result, "request_id": None} for result in results] == [
        {**one, "request_id": None} for one in single
    ]
    assert filled.service.stats()["queries"]["matches"] == before + 2 * 8
    count = f"kvindexer_match_depth_blocks_count {before + 2 * 8:.1f}"
    assert count in filled.get("/metrics").text


def test_empty_batch(filled: Indexer) -> None:
    assert filled.post("/v1/match/batch", {"queries": []}).json() == {"results": []}


def test_batch_in_msgpack(filled: Indexer) -> None:
    query = {"model": "m", "token_ids": TOKENS}
    headers = {"content-type": "application/msgpack", "accept": "application/msgpack"}
    body = msgspec.msgpack.encode({"queries": [query, query]})
    answer = msgspec.msgpack.decode(filled.post("/v1/match/batch", content=body, headers=headers).content)
    assert answer["results"] == [filled.post("/v1/match", query).json()] * 2


@pytest.mark.parametrize(
    ("body", "field"),
    [({}, "queries"), ({"queries": 1}, "queries"), ({"queries": [], "model": "m"}, "model")],
)
def test_batch_that_cannot_be(filled: Indexer, body: Any, field: str) -> None:
    response = filled.post("/v1/match/batch", body)
    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, field)


def test_batch_is_bounded(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(queries_max=2)
    query = {"model": "m", "token_ids": [1]}
    assert indexer.post("/v1/match/batch", {"queries": [query] * 2}).status_code == 200
    response = indexer.post("/v1/match/batch", {"queries": [query] * 3})
    assert (response.status_code, response.json()["bound"]) == (422, "queries_max")
