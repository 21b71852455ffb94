"""The OpenAPI document: valid, complete, and with examples that the service takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.conftest import Indexer, stored

METHODS = {"get", "put", "post", "delete", "patch"}


@pytest.fixture
def document(indexer: Indexer) -> dict[str, Any]:
    response = indexer.get("/openapi.json")
    assert response.status_code == 200
    made: dict[str, Any] = response.json()
    return made


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method in METHODS & item.keys():
            yield path, method, item[method]


def test_valid(document: dict[str, Any]) -> None:
    from openapi_spec_validator import validate  # two seconds, which no other worker has to take

    validate(document)


def test_every_route_is_described(document: dict[str, Any]) -> None:
    found = {(method, path) for path, method, _ in operations(document)}
    assert found == {
        ("post", "/v1/events"),
        ("post", "/v1/match"),
        ("post", "/v1/match/batch"),
        ("post", "/v1/fuzzy-match"),
        ("post", "/v1/route"),
        ("post", "/v1/hashes"),
        ("post", "/v1/prefixes"),
        ("get", "/v1/pods"),
        ("get", "/v1/pods/{pod}"),
        ("put", "/v1/pods/{pod}"),
        ("delete", "/v1/pods/{pod}"),
        ("delete", "/v1/pods/{pod}/blocks"),
        ("get", "/v1/owners"),
        ("delete", "/v1/owners/{owner}"),
        ("get", "/v1/stats"),
        ("get", "/v1/dump"),
        ("get", "/v1/live"),
        ("get", "/healthz"),
        ("get", "/readyz"),
        ("get", "/metrics"),
        ("post", "/register"),
        ("post", "/unregister"),
        ("get", "/workers"),
        ("get", "/services"),
        ("get", "/global_view"),
        ("post", "/query"),
        ("post", "/query_by_hash"),
        ("post", "/lookup"),
    }
    for path, method, operation in operations(document):
        assert operation["description"], (method, path)
        assert operation["tags"], (method, path)


def test_bodies_are_described_in_every_notation(document: dict[str, Any]) -> None:
    content = document["paths"]["/v1/match"]["post"]["requestBody"]["content"]
    assert set(content) == {"application/json", "application/msgpack", "application/octet-stream"}
    answer = document["paths"]["/v1/match"]["post"]["responses"]["200"]["content"]
    assert set(answer) == {"application/json", "application/msgpack"}


def test_references_lead_somewhere(document: dict[str, Any]) -> None:
    names = set(document["components"]["schemas"])
    text = json.dumps(document)
    used = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert used <= names
    assert "#/$defs/" not in text


def test_examples_are_taken(indexer: Indexer, document: dict[str, Any]) -> None:
    indexer.events(stored([1], [1, 2, 3, 4]))
    tried = 0
    for path, method, operation in operations(document):
        content = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if content is None:
            continue
        schema = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
        for example in schema["examples"]:
            response = indexer.request(method.upper(), path.replace("{pod}", "pod-a"), json=example)
            assert response.is_success, (path, response.text)
            tried += 1
    assert tried == 17


def test_page_for_people(indexer: Indexer) -> None:
    assert "openapi.json" in indexer.get("/docs").text


def test_what_each_route_needs_is_said(document: dict[str, Any]) -> None:
    """tests/api/test_access.py shows that it holds."""
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    said = {(method, path): operation["security"] for path, method, operation in operations(document)}
    assert said["get", "/healthz"] == said["get", "/readyz"] == []
    assert said["post", "/v1/match"] == said["get", "/metrics"] == [{"key": ["read"]}]
    assert said["post", "/v1/events"] == said["post", "/register"] == [{"key": ["write"]}]
    assert {
        needed for (method, _), (*needs,) in said.items() for needed in map(str, needs) if method == "delete"
    } == {"{'key': ['write']}"}
