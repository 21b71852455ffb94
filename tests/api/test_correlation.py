"""Ids of requests over HTTP: the same on both ways, in answers, problems and log lines."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Callable, Iterator

import pytest

from app.observability.logs import JsonFormatter
from app.schemas.problems import Problem
from app.service import IndexerService
from tests.api.conftest import Indexer, stored

TOKENS = list(range(100, 116))
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
MATCH = {"model": "m", "token_ids": TOKENS}


@contextlib.contextmanager
def written() -> Iterator[io.StringIO]:
    """What is logged meanwhile, as JSON lines."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        root.setLevel(level)
        root.removeHandler(handler)


def test_an_id_that_is_sent_comes_back(indexer: Indexer) -> None:
    for path, body in (("/v1/match", MATCH), ("/v1/events", {"pod": "a", "model": "m", "events": []})):
        answer = indexer.post(path, body, headers={"X-Request-ID": "r-1"})
        assert (answer.status_code, answer.headers.get_list("x-request-id")) == (200, ["r-1"])


def test_one_is_made_where_none_is_sent_or_none_that_can_be_kept(indexer: Indexer) -> None:
    ids = [
        indexer.post("/v1/match", MATCH, headers=headers).headers["x-request-id"]
        for headers in ({}, {}, {"X-Request-ID": "two words"}, {"X-Request-ID": "x" * 200})
    ]
    assert len(set(ids)) == 4
    assert all(len(made) <= 40 and made.isascii() for made in ids)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/match", {"model": "m", "token_ids": [-1]}, 422),
        ("POST", "/v1/events", {"pod": "a", "model": "m", "events": [stored([1], [1])]}, 422),
        ("POST", "/v1/match", {"model": "m", "token_ids": TOKENS, "invented": 1}, 422),
        ("GET", "/v1/pods/nobody", None, 404),
        ("GET", "/no/such/path", None, 404),
        ("PATCH", "/v1/match", None, 405),
    ],
)
def test_a_problem_says_the_id_of_its_answer(
    indexer: Indexer, method: str, path: str, body: object, status: int
) -> None:
    for headers in ({}, {"X-Request-ID": "r-1"}):
        answer = indexer.request(method, path, json=body, headers=headers)
        problem = Problem.model_validate(answer.json(), strict=True)
        assert (answer.status_code, problem.request_id) == (status, answer.headers["x-request-id"])


def test_a_fault_of_ours_has_the_id_in_its_answer(indexer: Indexer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(IndexerService, "match_json", fail)
    monkeypatch.setattr(IndexerService, "match", fail)
    answer = indexer.post("/v1/match", MATCH, headers={"X-Request-ID": "r-1"})
    assert (answer.status_code, answer.json()["request_id"], answer.headers["x-request-id"]) == (
        500,
        "r-1",
        "r-1",
    )


def test_log_lines_of_a_request_have_its_ids(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(access_log_every=1)
    headers = {"X-Request-ID": "r-1", "traceparent": TRACEPARENT}
    with written() as stream:
        indexer.events(stored([1], TOKENS[:4]), seq=0)
        body = {"pod": "pod-a", "model": "m", "events": [], "seq": 9}
        assert indexer.post("/v1/events", body, headers=headers).status_code == 200
        assert indexer.post("/v1/match?x=1", MATCH, headers=headers).status_code == 422
        assert indexer.post("/v1/match", MATCH, headers=headers).status_code == 200
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    told = [line for line in lines if line.get("request_id") == "r-1" and line["logger"].startswith("app.")]
    assert [line["logger"] for line in told] == ["app.service.registry", *["app.access"] * 3]
    assert {line["trace_id"] for line in told} == {TRACEPARENT[3:35]}
    assert [(line["method"], line["path"], line["route"], line["status"]) for line in told[1:]] == [
        ("POST", "/v1/events", "/v1/events", 200),
        ("POST", "/v1/match", "/v1/match", 422),
        ("POST", "/v1/match", "/v1/match", 200),
    ]
    assert all(line["duration_ms"] >= 0 for line in told[1:])


def test_sampled_access_log_says_of_how_many(
    make_indexer: Callable[..., Indexer], caplog: pytest.LogCaptureFixture
) -> None:
    indexer = make_indexer(access_log_every=3)
    caplog.set_level(logging.INFO)
    for _ in range(7):
        indexer.post("/v1/match", MATCH)
    lines = [vars(record) for record in caplog.records if record.name == "app.access"]
    assert [line["requests"] for line in lines] == [3, 3]


def test_nothing_is_logged_for_events_and_matches(indexer: Indexer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for seq in range(5):
        indexer.events(stored([seq + 1], TOKENS[4 * (seq % 4) :][:4]), seq=seq)
        indexer.depths(TOKENS)
    assert [record.name for record in caplog.records if record.name.startswith("app.")] == []
