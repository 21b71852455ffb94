"""Input that cannot be: a clear 4xx that names the fault and its place, and a picture that did not change."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from app.schemas.problems import Problem
from tests.api.conftest import Indexer, stored

TOKENS = list(range(100, 108))
JSON = {"content-type": "application/json"}
MSGPACK = {"content-type": "application/msgpack"}


@pytest.fixture
def filled(indexer: Indexer) -> Indexer:
    indexer.events(stored([1, 2], TOKENS), seq=0)
    return indexer


def refused(indexer: Indexer, path: str, body: bytes, headers: dict[str, str], **query: Any) -> Any:
    """The problem of a request that must change nothing."""
    before = indexer.picture()
    response = indexer.post(path, content=body, headers=headers, params=query)
    after = indexer.picture()
    assert response.headers["content-type"] == "application/problem+json", response.text
    Problem.model_validate(response.json(), strict=True)
    assert response.json()["status"] == response.status_code
    for picture in (before, after):  # a rejected event is counted, and that is all it does
        for pod in picture[3]["pods"]:
            for rank in pod["ranks"]:
                rank["rejected"] = 0
    assert after == before
    return response.json()


NESTED = {
    "arrays": b"[" * 200_000,
    "objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "in a field": b'{"model":"m","pod":"pod-a","events":[],"token_ids":'
    + b"[" * 90_000
    + b"]" * 90_000
    + b"}",
}


@pytest.mark.parametrize("path", ["/v1/events", "/v1/match", "/v1/hashes", "/v1/prefixes"])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"model": }', b"nonsense", b'{"model":"m"} trailing', b"\xff\xfe", b'{"model":"\xff"}'],
)
def test_malformed_json(filled: Indexer, path: str, body: bytes) -> None:
    problem = refused(filled, path, body, JSON)
    assert problem["status"] == 400
    assert "not JSON" in problem["detail"]


@pytest.mark.parametrize("path", ["/v1/events", "/v1/match"])
@pytest.mark.parametrize("body", [b"[]", b"1", b"null", b'"text"'])
def test_not_an_object(filled: Indexer, path: str, body: bytes) -> None:
    assert refused(filled, path, body, JSON)["status"] == 422


@pytest.mark.parametrize("path", ["/v1/events", "/v1/match"])
@pytest.mark.parametrize("name", NESTED)
def test_nesting_bomb(filled: Indexer, path: str, name: str) -> None:
    problem = refused(filled, path, NESTED[name], JSON)
    assert problem["status"] in (400, 422)
    assert len(json.dumps(problem)) < 2_000, "the answer does not repeat the bomb"


def test_nesting_bomb_in_msgpack(filled: Indexer) -> None:
    bomb = b"\x93\x01" + b"\x91" * 100_000 + b"\xc0\x00"
    problem = refused(filled, "/v1/events", bomb, MSGPACK, pod="pod-a", model="m")
    assert problem["status"] in (400, 422)
    bomb = b"\x82\xa5model\xa1m\xa9token_ids" + b"\x91" * 100_000 + b"\xc0"
    assert refused(filled, "/v1/match", bomb, MSGPACK)["status"] == 400


def test_nesting_bomb_in_an_event(filled: Indexer) -> None:
    body = json.dumps({"pod": "pod-a", "events": []}).encode()
    for inner in (b"[" * 500 + b"]" * 500, b'{"a":' * 500 + b"1" + b"}" * 500):
        bomb = body.replace(b"[]", b'[{"type":"BlockStored","block_hashes":' + inner + b"}]")
        assert refused(filled, "/v1/events", bomb, JSON)["status"] in (400, 422)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x93\x01", b"text", b"\xd9\xff", b"\x00", b"\x91\xcb", b"{}"]
)
def test_bytes_that_are_not_a_batch(filled: Indexer, body: bytes) -> None:
    problem = refused(filled, "/v1/events", body, MSGPACK, pod="pod-a", model="m")
    assert problem["status"] == 400
    assert problem["type"].endswith("unreadable-batch")


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x82\xa5model", b"\xdf\xff\xff\xff\xff", b"\x81\x01\x02"])
def test_bytes_that_are_not_msgpack(filled: Indexer, body: bytes) -> None:
    assert refused(filled, "/v1/match", body, MSGPACK)["status"] in (400, 422)


MATCHES: list[tuple[Any, str]] = [
    ({"model": "m"}, "token_ids"),
    ({"model": "m", "token_ids": None}, "token_ids"),
    ({"token_ids": TOKENS}, "model"),
    ({"model": "", "token_ids": TOKENS}, "model"),
    ({"model": 7, "token_ids": TOKENS}, "model"),
    ({"model": "m" * 2_000, "token_ids": TOKENS}, "model"),
    ({"model": "m", "token_ids": TOKENS, "prefix_hashes": [1]}, "prefix_hashes"),
    ({"model": "m", "token_ids": "1,2"}, "token_ids"),
    ({"model": "m", "token_ids": {"0": 1}}, "token_ids"),
    ({"model": "m", "token_ids": [1, "2"]}, "token_ids[1]"),
    ({"model": "m", "token_ids": [1, 2, -1]}, "token_ids[2]"),
    ({"model": "m", "token_ids": [2**32]}, "token_ids[0]"),
    ({"model": "m", "token_ids": [1.5]}, "token_ids[0]"),
    ({"model": "m", "token_ids": [True]}, "token_ids[0]"),
    ({"model": "m", "token_ids": [None]}, "token_ids[0]"),
    ({"model": "m", "token_ids": [[1]]}, "token_ids[0]"),
    ({"model": "m", "prefix_hashes": [-1]}, "prefix_hashes[0]"),
    ({"model": "m", "prefix_hashes": ["ff"]}, "prefix_hashes[0]"),
    ({"model": "m", "prefix_hashes": [1], "cache_salt": "s"}, "prefix_hashes"),
    ({"model": "m", "token_ids": TOKENS, "extra_keys": ["salt"]}, "extra_keys[0]"),
    ({"model": "m", "token_ids": TOKENS, "extra_keys": [[{"map": 1}]]}, "extra_keys[0][0]"),
    ({"model": "m", "token_ids": TOKENS, "block_size": 0}, "block_size"),
    ({"model": "m", "token_ids": TOKENS, "block_size": 1.5}, "block_size"),
    ({"model": "m", "token_ids": TOKENS, "pods": "pod-a"}, "pods"),
    ({"model": "m", "token_ids": TOKENS, "pods": [1]}, "pods[0]"),
    ({"model": "m", "token_ids": TOKENS, "pods": ["p"] * 10_001}, "pods"),
    ({"model": "m", "token_ids": TOKENS, "extra_keys": [["x" * 100]] * 20_000}, "extra_keys"),
    ({"model": "m", "token_ids": TOKENS, "include_hashes": "yes"}, "include_hashes"),
    ({"model": "m", "token_ids": TOKENS, "lora": -1}, "lora"),
    ({"model": "m", "token_ids": TOKENS, "lora": True}, "lora"),
    ({"model": "m", "token_ids": TOKENS, "lora": [3]}, "lora"),
    ({"model": "m", "token_ids": TOKENS, "text": "twice"}, "text"),
    ({"model": "m", "text": "a", "messages": []}, "messages"),
    ({"model": "m", "text": "a", "tools": []}, "tools"),
    ({"model": "m", "token_ids": TOKENS, "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ({"model": "m", "token_ids": TOKENS, "min_blocks": -1}, "min_blocks"),
    ({"model": "m", "token_ids": TOKENS, "top_k": 0}, "top_k"),
    ({"model": "m", "token_ids": TOKENS, "mdoel": "m"}, "mdoel"),
]
# msgpack has no such numbers.
MATCHES_IN_JSON_ONLY: list[tuple[Any, str]] = [
    ({"model": "m", "token_ids": [2**70]}, "token_ids[0]"),
    ({"model": "m", "prefix_hashes": [1, 2**64]}, "prefix_hashes[1]"),
    ({"model": "m", "token_ids": TOKENS, "extra_keys": [[2**80]]}, "extra_keys[0][0]"),
]


@pytest.mark.parametrize(("fields", "place"), MATCHES + MATCHES_IN_JSON_ONLY)
def test_match_that_cannot_be(filled: Indexer, fields: Any, place: str) -> None:
    problem = refused(filled, "/v1/match", json.dumps(fields).encode(), JSON)
    assert problem["status"] == 422
    assert place in [fault["field"] for fault in problem["errors"]], problem


@pytest.mark.parametrize(("fields", "place"), MATCHES)
def test_match_in_msgpack_that_cannot_be(filled: Indexer, fields: Any, place: str) -> None:
    problem = refused(filled, "/v1/match", msgspec.msgpack.encode(fields), MSGPACK)
    assert problem["status"] == 422
    assert place in [fault["field"] for fault in problem["errors"]], problem


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/pods/pod-z", None),
        ("DELETE", "/v1/pods/pod-z", None),
        ("DELETE", "/v1/pods/pod-z/blocks", None),
        ("POST", "/v1/prefixes", {"model": "m", "pod": "pod-z", "token_ids": TOKENS, "ttl_s": 1.0}),
    ],
)
def test_unknown_pod(filled: Indexer, method: str, path: str, body: Any) -> None:
    before = filled.picture()
    response = filled.request(method, path, json=body)
    assert response.status_code == 404
    assert "pod-z" in Problem.model_validate(response.json(), strict=True).detail
    assert filled.picture() == before


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/stats"),
        ("GET", "/v1/pods"),
        ("GET", "/v1/pods/pod-a"),
        ("DELETE", "/v1/pods/pod-a"),
        ("DELETE", "/v1/pods/pod-a/blocks"),
        ("GET", "/v1/owners"),
        ("DELETE", "/v1/owners/o"),
        ("GET", "/v1/dump"),
        ("GET", "/v1/live"),
        ("POST", "/v1/match"),
        ("POST", "/v1/hashes"),
        ("PUT", "/v1/pods/pod-a"),
    ],
)
def test_a_query_parameter_that_nobody_knows(filled: Indexer, method: str, path: str) -> None:
    """One that is known to a longer path, say: DELETE of a pod with a tier would forget all of it."""
    filled.events(stored([3], TOKENS[:4]), owner="o")
    before = filled.picture(), filled.get("/v1/owners").json()
    body = None if method in ("GET", "DELETE") else {"model": "m", "token_ids": TOKENS}
    response = filled.request(method, f"{path}?invented=gpu", json=body)
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "invented"
    assert (filled.picture(), filled.get("/v1/owners").json()) == before


@pytest.mark.parametrize(
    ("event", "word"),
    [
        (stored([2**64], TOKENS[:4]), "hash"),
        (stored([-(2**63) - 1], TOKENS[:4]), "hash"),
        (stored([9], [1, 2, 3, 2**32]), "token"),
        (stored([9], [1, 2, 3, -1]), "token"),
        (stored([9], TOKENS[:4], block_size=0), "block_size"),
        (stored([9], TOKENS[:4], block_size=-4), "block_size"),
        (stored([9], TOKENS, block_size=8), "block_size"),
        (stored([9, 10], TOKENS[:4]), "token_ids"),
        (stored([9], TOKENS[:5]), "token_ids"),
        (stored([9], TOKENS[:4], parent=2**64), "parent"),
        ({"type": "BlockStored"}, "block_hashes"),
        ({"type": "Nothing"}, "Nothing"),
        ({}, "type"),
        ([], ""),
        (7, ""),
        (None, ""),
    ],
)
def test_event_that_cannot_be(filled: Indexer, event: Any, word: str) -> None:
    body = json.dumps({"pod": "pod-a", "seq": 1, "events": [event]}).encode()
    problem = refused(filled, "/v1/events", body, JSON)
    assert problem["status"] == 422
    assert problem["errors"][0]["field"] == "events[0]"
    assert word in problem["errors"][0]["detail"]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"events": []}, "pod"),
        ({"pod": "pod-a"}, "events"),
        ({"pod": "pod-a", "events": None}, "events"),
        ({"pod": "pod-a", "events": {}}, "events"),
        ({"pod": "", "events": []}, "pod"),
        ({"pod": "a\x00b", "model": "m", "events": []}, "pod"),
        ({"pod": "pod-a", "events": [], "seq": -1}, "seq"),
        ({"pod": "pod-a", "events": [], "seq": 2**64}, "seq"),
        ({"pod": "pod-a", "events": [], "seq": 1.0}, "seq"),
        ({"pod": "pod-a", "events": [], "dp_rank": -1}, "dp_rank"),
        ({"pod": "pod-a", "events": [], "dp_rank": 2**40}, "dp_rank"),
        ({"pod": "pod-a", "events": [], "dp_rank": "0"}, "dp_rank"),
        ({"pod": "pod-a", "events": [], "ts": "now"}, "ts"),
        ({"pod": "pod-new", "events": []}, "model"),
        ({"pod": "pod-a", "model": "other", "events": []}, "model"),
    ],
)
def test_envelope_that_cannot_be(filled: Indexer, fields: Any, place: str) -> None:
    problem = refused(filled, "/v1/events", json.dumps(fields).encode(), JSON)
    assert problem["status"] == 422
    assert place in [fault["field"] for fault in problem["errors"]], problem


@pytest.mark.parametrize("size", [1, 2, 3, 4_097])
def test_octets_of_a_part_of_a_token(filled: Indexer, size: int) -> None:
    headers = {"content-type": "application/octet-stream"}
    problem = refused(filled, "/v1/match", b"\0" * size, headers, model="m")
    assert problem["status"] == 422
    assert "4 bytes" in problem["detail"]


def test_octets_without_a_model(filled: Indexer) -> None:
    headers = {"content-type": "application/octet-stream"}
    problem = refused(filled, "/v1/match", struct.pack("<2I", 1, 2), headers)
    assert problem["errors"][0]["field"] == "model"


@pytest.mark.parametrize("query", ["modle=m&model=m", "model=m&model=n", "model=m&block_size=x"])
def test_wrong_query(filled: Indexer, query: str) -> None:
    response = filled.post(
        f"/v1/match?{query}", content=b"", headers={"content-type": "application/octet-stream"}
    )
    assert response.status_code == 422


def test_query_beside_a_json_body(filled: Indexer) -> None:
    response = filled.post("/v1/match?model=m", {"model": "m", "token_ids": TOKENS})
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "model"


@pytest.mark.parametrize("path", ["/v1/events", "/v1/match", "/v1/hashes", "/v1/prefixes"])
def test_content_type_that_is_not_ours(filled: Indexer, path: str) -> None:
    for said in ("text/plain", "application/x-www-form-urlencoded", "application/cbor", ""):
        problem = refused(filled, path, b"{}", {"content-type": said})
        assert problem["status"] == 415
        assert "application/json" in problem["detail"]


def test_compressed_body(filled: Indexer) -> None:
    problem = refused(filled, "/v1/match", b"{}", {**JSON, "content-encoding": "gzip"})
    assert problem["status"] == 415


def test_body_past_its_bound(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(body_bytes_max=1_024)
    fits = b'{"model":"m","token_ids":[]}'
    fits += b" " * (1_024 - len(fits))
    assert indexer.post("/v1/match", content=fits, headers=JSON).status_code == 200
    problem = refused(indexer, "/v1/match", fits + b" ", JSON)
    assert (problem["status"], problem["bound"]) == (413, "body_bytes_max")
    assert "1024" in problem["detail"]


def test_absurd_content_length(filled: Indexer) -> None:
    """More digits than Python turns into a number."""
    headers = {**JSON, "content-length": "9" * 5_000}
    assert refused(filled, "/v1/match", b"{}", headers)["status"] == 413


def test_body_in_many_small_chunks(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(body_bytes_max=1_024)
    body = json.dumps({"model": "m", "token_ids": TOKENS}).encode()

    def response(padding: int) -> Any:
        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 2):
                yield body[start : start + 2]
            for _ in range(padding):
                yield b"  "

        return indexer.post("/v1/match", content=chunks(), headers=JSON)

    assert response(0).json()["tokens"] == len(TOKENS)
    assert response((1_024 - len(body)) // 2).status_code == 200
    assert response((1_024 - len(body)) // 2 + 1).status_code == 413


def test_many_faults_are_named_within_reason(filled: Indexer) -> None:
    body = json.dumps({"pod": "pod-a", "events": [7] * 5_000}).encode()
    problem = refused(filled, "/v1/events", body, JSON)
    assert len(problem["errors"]) == 100
    assert len(problem["detail"]) < 1_000


def test_many_unknown_fields_are_named_within_reason(filled: Indexer) -> None:
    body = json.dumps({f"field{i}": i for i in range(10_000)}).encode()
    assert len(json.dumps(refused(filled, "/v1/match", body, JSON))) < 2_000


_ZEROS = b"[" + b"0," * 500_000 + b"0]"
_HOSTILE = {
    "pods": ("/v1/match", b'{"model":"m","token_ids":[1],"pods":%b}' % _ZEROS),
    "one value": ("/v1/match", b'{"token_ids":[1],"model":%b}' % _ZEROS),
    "hashes": ("/v1/match", b'{"model":"m","prefix_hashes":%b}' % _ZEROS.replace(b",0]", b",-1]")),
    "events": ("/v1/events", b'{"pod":"pod-a","events":%b}' % _ZEROS),
    "object": ("/v1/match", b"{%b}" % b",".join(b'"%x":0' % number for number in range(100_000))),
    "the whole": ("/v1/match", _ZEROS),
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_no_object_is_built_for_each_number(filled: Indexer, name: str) -> None:
    """A list of small integers is 8 bytes a number, one of raw values 100: neither may be made.

    The buffer of hashes is 8 bytes a number too, but bounded, and no list beside it.
    """
    path, body = _HOSTILE[name]
    tracemalloc.start()
    try:
        response = filled.post(path, content=body, headers=JSON)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert response.status_code == 422
    assert peak < (6 if name == "hashes" else 3) * len(body)
