"""Pods over their life: registered, seen, partly forgotten, gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from app.schemas.pods import PodResponse, PodsResponse
from tests.api.conftest import Indexer, stored

TOKENS = list(range(100, 116))


def test_put_get_delete(indexer: Indexer) -> None:
    said = {"model": "m", "block_size": 4, "lora": None}
    put = indexer.request("PUT", "/v1/pods/pod-a", json=said)
    assert put.status_code == 200
    assert indexer.get("/v1/pods/pod-a").json() == put.json()
    PodResponse.model_validate(put.json(), strict=True)
    PodsResponse.model_validate(indexer.get("/v1/pods").json(), strict=True)
    assert indexer.request("PUT", "/v1/pods/pod-a", json=said).json() == put.json()
    assert indexer.request("DELETE", "/v1/pods/pod-a").status_code == 204
    assert indexer.get("/v1/pods/pod-a").status_code == 404


def test_pod_shows_what_it_holds(indexer: Indexer) -> None:
    indexer.events(stored([1, 2], TOKENS[:8]), stored([3], TOKENS[8:12], parent=2, medium="CPU"), seq=521)
    indexer.clock.now_s += 0.5
    answer = indexer.get("/v1/pods/pod-a").json()
    assert (answer["pod"], answer["model"], answer["block_size"], answer["zmq_endpoint"]) == (
        "pod-a",
        "m",
        4,
        None,
    )
    (rank,) = answer["ranks"]
    assert rank["blocks"].items() >= {"gpu": 2, "cpu": 1}.items()
    assert (rank["last_seq"], rank["last_event_age_s"], rank["state"]) == (521, 0.5, "live")


def test_pods_are_listed_by_name(indexer: Indexer) -> None:
    for name in ("pod-c", "pod-a", "pod-b"):
        indexer.events(pod=name)
    assert [pod["pod"] for pod in indexer.get("/v1/pods").json()["pods"]] == ["pod-a", "pod-b", "pod-c"]


def test_put_by_msgpack(indexer: Indexer) -> None:
    body = msgspec.msgpack.encode({"model": "m"})
    headers = {"content-type": "application/msgpack", "accept": "application/msgpack"}
    response = indexer.request("PUT", "/v1/pods/pod-a", content=body, headers=headers)
    assert msgspec.msgpack.decode(response.content)["model"] == "m"


def test_a_name_can_be_a_url(indexer: Indexer) -> None:
    name = "http://10.0.0.7:8000"
    indexer.events(stored([1], TOKENS[:4]), pod=name)
    assert indexer.get(f"/v1/pods/{name}").json()["pod"] == name
    assert indexer.get("/v1/pods/http%3A%2F%2F10.0.0.7%3A8000").json()["pod"] == name
    assert indexer.request("DELETE", f"/v1/pods/{name}/blocks").json() == {"removed_blocks": 1}


def test_pod_that_is_followed_starts_down(indexer: Indexer) -> None:
    said = {"model": "m", "zmq_endpoint": "tcp://127.0.0.1:1", "dp_size": 2}
    answer = indexer.request("PUT", "/v1/pods/pod-a", json=said).json()
    assert [(rank["dp_rank"], rank["state"]) for rank in answer["ranks"]] == [(0, "down"), (1, "down")]


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({}, "model"),
        ({"model": ""}, "model"),
        ({"model": "m\n"}, "model"),
        ({"model": "m", "block_size": 0}, "block_size"),
        ({"model": "m", "block_size": True}, "block_size"),
        ({"model": "m", "dp_size": 0}, "dp_size"),
        ({"model": "m", "dp_size": "2"}, "dp_size"),
        ({"model": "m", "zmq_endpoint": "http://h:1"}, "zmq_endpoint"),
        ({"model": "m", "zmq_endpoint": "tcp://h:70000"}, "zmq_endpoint"),
        ({"model": "m", "replay_endpoint": "tcp://h:1"}, "replay_endpoint"),
        (
            {"model": "m", "zmq_endpoint": "tcp://h:1", "replay_endpoint": "tcp://h:2", "dp_size": 2},
            "replay_endpoint",
        ),
        ({"model": "m", "pod": "pod-a"}, "pod"),
    ],
)
def test_impossible_pod_changes_nothing(indexer: Indexer, said: dict[str, Any], field: str) -> None:
    indexer.events(stored([1], TOKENS[:4]))
    before = indexer.picture()
    response = indexer.request("PUT", "/v1/pods/pod-a", json=said)
    assert response.status_code == 422
    assert field in [fault["field"] for fault in response.json()["errors"]]
    assert indexer.picture() == before


def test_too_many_ranks(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(dp_ranks_max=2)
    response = indexer.request("PUT", "/v1/pods/pod-a", json={"model": "m", "dp_size": 3})
    assert (response.status_code, response.json()["bound"]) == (422, "dp_ranks_max")
    assert indexer.events(dp_rank=2).status_code == 422
    assert indexer.get("/v1/pods").json() == {"pods": []}


def test_remove_blocks_by_tier_and_adapter(indexer: Indexer) -> None:
    indexer.events(stored([1], TOKENS[:4]), stored([1], TOKENS[:4], medium="CPU"))
    indexer.events(stored([2], TOKENS[:4]), lora="a")
    gone = indexer.request("DELETE", "/v1/pods/pod-a/blocks", params={"lora": "a"})
    assert gone.json() == {"removed_blocks": 1}
    assert indexer.depths(TOKENS, lora="a") == {}
    gone = indexer.request("DELETE", "/v1/pods/pod-a/blocks", params={"tier": "cpu"})
    assert gone.json() == {"removed_blocks": 1}
    assert indexer.depths(TOKENS) == {"pod-a": 1}
    gone = indexer.request("DELETE", "/v1/pods/pod-a/blocks", params={"model": "m", "dp_rank": 0})
    assert gone.json() == {"removed_blocks": 1}
    assert indexer.depths(TOKENS) == {}


@pytest.mark.parametrize(
    ("query", "field"),
    [("tier=tape", "tier"), ("dp_rank=x", "dp_rank"), ("rank=0", "rank"), ("dp_rank=9", "dp_rank")],
)
def test_remove_blocks_with_a_wrong_query(indexer: Indexer, query: str, field: str) -> None:
    indexer.events(stored([1], TOKENS[:4]))
    response = indexer.request("DELETE", f"/v1/pods/pod-a/blocks?{query}")
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == field
    assert indexer.depths(TOKENS) == {"pod-a": 1}


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/pods/none"), ("DELETE", "/v1/pods/none"), ("DELETE", "/v1/pods/none/blocks")],
)
def test_unknown_pod_is_404(indexer: Indexer, method: str, path: str) -> None:
    response = indexer.request(method, path)
    assert response.status_code == 404
    assert response.json()["type"] == "urn:kvindexer:problem:unknown-pod"
    assert "'none'" in response.json()["detail"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/v1/pods/a/blocks", {"model": "m"}),
        (
            "POST",
            "/v1/events",
            {"pod": "a/blocks", "model": "m", "owner": "o", "events": [stored([1], [1, 2, 3, 4])]},
        ),
        ("POST", "/v1/events", {"pod": "a/blocks", "events": []}),
        (
            "POST",
            "/register",
            {
                "instance_id": "a/blocks",
                "endpoint": "tcp://127.0.0.1:1",
                "model_name": "m",
                "block_size": 4,
                "dp_rank": 0,
            },
        ),
    ],
    ids=["PUT", "its first batch", "without a model", "register"],
)
def test_a_name_that_could_not_be_deleted_is_refused(
    indexer: Indexer, method: str, path: str, body: dict[str, Any]
) -> None:
    """DELETE of its path is that of the blocks of the pod a."""
    before = indexer.picture(), indexer.get("/v1/owners").json()
    response = indexer.request(method, path, json=body)
    assert response.status_code == 422, response.text
    assert response.json()["errors"][0]["field"] == "pod"
    assert (indexer.picture(), indexer.get("/v1/owners").json()) == before


def test_a_405_names_every_method_of_the_path(indexer: Indexer) -> None:
    response = indexer.request("PATCH", "/v1/pods/pod-a")
    assert (response.status_code, response.headers["allow"]) == (405, "DELETE, GET, PUT")
    assert indexer.get("/v1/match").headers["allow"] == "POST"
