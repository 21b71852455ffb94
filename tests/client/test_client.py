"""Both clients against the real service: typed answers, and every call of a router."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from app.api.short_way import read_notation
from app.client import Load, Prompt, calls
from app.errors import InvalidInput, Refused
from tests.api.conftest import stored
from tests.client.conftest import Driver, Misbehaving

TOKENS = list(range(1, 14))
Connect = Callable[..., Driver]


@pytest.fixture
def client(connect: Connect, url: str) -> Driver:
    return connect(url)


def store(client: Driver, pod: str = "pod-a", *, tokens: int = 12, **fields: Any) -> Any:
    hashes = list(range(1, tokens // 4 + 1))
    return client.events(pod, [stored(hashes, TOKENS[:tokens], **fields)], model="m", seq=0)


def test_events_then_match(client: Driver) -> None:
    told = store(client)
    assert (told.accepted, told.stored_blocks, told.rejected, told.duplicate) == (1, 3, (), False)
    assert store(client).duplicate
    store(client, "pod-b", tokens=4)
    answer = client.match(Prompt(model="m", token_ids=TOKENS), include_hashes=True)
    assert (answer.degraded, answer.cause, answer.block_size, answer.tokens, answer.blocks) == (
        False,
        "",
        4,
        13,
        3,
    )
    assert [(row.pod, row.matched_blocks, row.reusable_tokens) for row in answer.matches] == [
        ("pod-a", 3, 12),
        ("pod-b", 1, 4),
    ]
    assert answer.best is answer.matches[0]
    assert answer.best.tiers["gpu"] == 3
    assert answer.best.state == "live"
    assert len(answer.prefix_hashes) == 3
    only = client.match(Prompt(model="m", token_ids=TOKENS), pods=["pod-b"])
    assert [row.pod for row in only.matches] == ["pod-b"]
    assert client.match(Prompt(model="other", token_ids=TOKENS)).best is None


def test_bad_events_are_named(client: Driver) -> None:
    told = client.events("pod-a", [stored([1], TOKENS[:4]), {"type": "BlockStored"}], model="m")
    assert (told.accepted, [fault.index for fault in told.rejected]) == (1, [1])


@pytest.mark.parametrize(
    "context",
    [
        {},
        {"lora": "x"},
        {"cache_salt": "salt"},
        {"extra_keys": [None, [["image", 3]]]},
        {"extra_keys": [[b"digest"]]},
        {"lora": "x", "cache_salt": "salt", "extra_keys": [[["image", 0]]]},
    ],
)
def test_hashing_here_is_hashing_there(client: Driver, context: dict[str, Any]) -> None:
    prompt = Prompt(model="m", token_ids=TOKENS, block_size=4, **context)
    answer = client.match(prompt, include_hashes=True)
    hashed = prompt.hashed()
    assert hashed.prefix_hashes == list(answer.prefix_hashes)
    assert (hashed.token_ids, hashed.cache_salt, hashed.extra_keys) == (None, None, None)
    client.put_pod("pod-a", model="m", block_size=4)
    assert client.prefixes(hashed, "pod-a").added == 3
    assert client.match(hashed).best.speculative_blocks == 3
    assert client.match(prompt).best.speculative_blocks == 3


def test_a_matched_prompt_by_hashes(client: Driver) -> None:
    store(client)
    assert client.match(Prompt(model="m", token_ids=TOKENS, block_size=4).hashed()).best.matched_blocks == 3


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt(model="m", token_ids=[1]),
        Prompt(model="m", block_size=4),
        Prompt(model="m", token_ids=[-1], block_size=4),
        Prompt(model="m", token_ids=[2**32], block_size=4),
    ],
)
def test_what_cannot_be_hashed(prompt: Prompt) -> None:
    with pytest.raises(InvalidInput):
        prompt.hashed()


def test_route(client: Driver) -> None:
    """The pod that has the prompt, unless it is far too busy; the choice is announced, so it holds for the next."""
    store(client)
    client.put_pod("pod-b", model="m", block_size=4)
    prompt = Prompt(model="m", token_ids=TOKENS)
    answer = client.route(prompt, reserve=False)
    assert (answer.pod, answer.dp_rank, answer.degraded, answer.tokens, answer.reserved_blocks) == (
        "pod-a",
        0,
        False,
        13,
        0,
    )
    assert [(row.pod, row.matched_blocks, row.state) for row in answer.candidates] == [
        ("pod-a", 3, "live"),
        ("pod-b", 0, "live"),
    ]
    busy = {"pod-a": Load(running=500, waiting=100, kv_usage=1.0), "pod-b": Load()}
    answer = client.route(prompt, loads=busy)
    assert (answer.pod, answer.reserved_blocks, answer.candidates[0].load) == ("pod-b", 3, Load())
    assert {row.pod: row.speculative_blocks for row in client.match(prompt).matches}["pod-b"] == 3
    only = client.route(prompt, pods=["pod-c"], policy="round_robin", reserve=False)
    assert (only.pod, only.policy) == ("pod-c", "round_robin")


def test_an_indexer_that_knows_no_pod_yet_stops_no_router(client: Driver) -> None:
    """It has just begun, and its pods have not spoken: that is no fault of the request, and passes."""
    for _ in range(10):
        chosen = client.route(Prompt(model="m", token_ids=TOKENS))
        assert (chosen.pod, chosen.degraded) == (None, True)
        assert "serves model 'm'" in chosen.cause
        told = client.prefixes(Prompt(model="m", token_ids=TOKENS), "pod-a")
        assert (told.added, told.degraded) == (0, True)
        assert "'pod-a'" in told.cause
    assert client.client.circuit.state == "closed"
    store(client)
    assert client.route(Prompt(model="m", token_ids=TOKENS)).pod == "pod-a"


def test_pods(client: Driver) -> None:
    assert client.pods() == ()
    put = client.put_pod("http://10.0.0.7:8000", model="m", block_size=16, dp_size=2)
    assert (put.pod, put.model, put.block_size, len(put.ranks)) == ("http://10.0.0.7:8000", "m", 16, 2)
    assert client.pod("http://10.0.0.7:8000") == put
    assert client.pods() == (put,)
    client.delete_pod("http://10.0.0.7:8000")
    with pytest.raises(Refused, match="no pod named"):
        client.pod("http://10.0.0.7:8000")


def test_stats(client: Driver) -> None:
    store(client)
    client.match(Prompt(model="m", token_ids=TOKENS))
    stats = client.stats()
    assert (stats["pods"], stats["queries"]["tokens_matched"]) == (1, 12)


def test_a_wrong_request_raises_and_the_circuit_stays_closed(client: Driver) -> None:
    for _ in range(10):
        with pytest.raises(Refused) as caught:
            client.match(Prompt(model="m"))
        assert caught.value.status == 422
    assert client.client.circuit.state == "closed"


def test_as_a_context_manager(connect: Connect, url: str) -> None:
    """Both leave nothing open: an unclosed connection is a warning, and warnings are errors."""
    driver = connect(url)
    assert driver.client.__class__.__name__ in {"Client", "AsyncClient"}
    assert driver.stats()["pods"] == 0


def test_the_client_loads_neither_server_nor_native_core() -> None:
    script = (
        "import sys, app.client\n"
        "unwanted = {'app._native', 'app.service', 'app.index', 'app.main', 'app.api', 'fastapi', 'pydantic'}\n"
        "bad = unwanted & set(sys.modules)\n"
        "assert not bad, bad"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_headers_of_the_routed_request_go_along(connect: Connect, server: Misbehaving) -> None:
    client = connect(server.url, api_key="secret")
    prompt = Prompt(model="m", token_ids=TOKENS)
    sent = {"X-Request-ID": "r-1", "traceparent": "00-1-2-01", "Content-Type": "text/plain"}
    client.match(prompt, headers=sent)
    client.route(prompt, headers=sent)
    client.prefixes(prompt, "pod-a", headers=sent)
    client.match(prompt)
    for _, path, _, headers in server.seen[:3]:
        assert (headers["x-request-id"], headers["traceparent"]) == ("r-1", "00-1-2-01")
        ours = "application/json" if path == "/v1/match" else "application/msgpack"
        assert headers["content-type"] == headers["accept"] == ours, "what describes our body is ours"
        assert headers["authorization"] == "Bearer secret"
    assert "x-request-id" not in server.seen[3][3], "of one call, not of the client"


@pytest.mark.parametrize(
    ("more", "notation"),
    [
        ({}, "application/json"),
        ({"lora": "l", "cache_salt": "s"}, "application/json"),
        ({"extra_keys": [[b"k"]]}, None),
    ],
)
def test_a_match_is_asked_so_that_the_indexer_answers_the_short_way(
    more: dict[str, Any], notation: str | None
) -> None:
    """But for extra keys, whose bytes are none in JSON."""
    call = calls.match(
        Prompt(model="m", token_ids=TOKENS, **more), pods=["a"], include_hashes=False, extra={}
    )
    headers = [(name.encode(), value.encode()) for name, value in call.headers().items()]
    assert read_notation(headers, 1_000_000) == notation
