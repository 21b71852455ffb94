"""An indexer that is down, late, overloaded or broken: a router must not notice more than an empty answer."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from app.client import CircuitState, ClientSettings, Load, Prompt
from app.errors import Refused, Unresponsive
from tests.client.conftest import Driver, Misbehaving
from tests.serving.test_serving import serving

PROMPT = Prompt(model="m", lora="x", token_ids=[1, 2, 3])
QUICK = ClientSettings(budget_s=0.2, attempts_max=2, backoff_s=0.001)
PATIENT = ClientSettings(budget_s=20.0, attempts_max=3, backoff_s=0.001)
Connect = Callable[..., Driver]


class Clock:
    """Seconds that only move when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port: int = probe.getsockname()[1]
        return port


def test_nobody_is_there(connect: Connect) -> None:
    client = connect(f"http://127.0.0.1:{free_port()}", settings=PATIENT)
    answer = client.match(PROMPT)
    assert (answer.model, answer.lora, answer.matches, answer.degraded) == ("m", "x", (), True)
    assert "ConnectError" in answer.cause
    route = client.route(PROMPT, pods=["a"], loads={"a": Load(running=1)})
    assert (route.pod, route.candidates, route.degraded) == (None, (), True)
    announced = client.prefixes(PROMPT, "pod-a")
    assert (announced.added, announced.degraded) == (0, True)


@pytest.mark.parametrize("call", ["pods", "stats"])
def test_what_must_not_be_lost_raises(connect: Connect, call: str) -> None:
    client = connect(f"http://127.0.0.1:{free_port()}", settings=QUICK)
    with pytest.raises(Unresponsive, match="ConnectError"):
        getattr(client, call)()
    with pytest.raises(Unresponsive, match="/v1/events"):
        client.events("pod-a", [], model="m")


def test_the_server_is_killed(connect: Connect) -> None:
    with serving("serve", "--port", "0") as (process, port):
        client = connect(f"http://127.0.0.1:{port}", settings=PATIENT)
        assert not client.match(PROMPT).degraded
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        assert client.match(PROMPT).degraded
    with serving("serve", "--port", str(port)):
        assert not client.match(PROMPT).degraded, "a client outlives its indexer"


def test_a_late_answer_is_no_answer(connect: Connect, server: Misbehaving) -> None:
    """The budget is kept, generously measured: without it this would wait until the test ends."""
    server.script = ["hang"] * 4
    client = connect(server.url, settings=QUICK)
    began_s = time.monotonic()
    answer = client.match(PROMPT)
    assert answer.degraded
    assert time.monotonic() - began_s < 10


def test_an_overloaded_indexer_is_asked_again(connect: Connect, server: Misbehaving) -> None:
    server.script = [503, 500]
    client = connect(server.url, settings=PATIENT)
    assert not client.match(PROMPT).degraded
    assert len(server.seen) == 3
    assert client.client.circuit.state is CircuitState.CLOSED


def test_attempts_are_counted(connect: Connect, server: Misbehaving) -> None:
    server.script = [503] * 10
    answer = connect(server.url, settings=PATIENT).match(PROMPT)
    assert (answer.degraded, "503" in answer.cause, len(server.seen)) == (True, True, 3)


def test_a_wait_that_does_not_fit_the_budget_is_not_begun(connect: Connect, server: Misbehaving) -> None:
    server.script, server.retry_after = [503] * 10, "3600"
    answer = connect(server.url, settings=PATIENT).match(PROMPT)
    assert (answer.degraded, len(server.seen)) == (True, 1)


def test_events_are_sent_again_only_with_a_number(connect: Connect, server: Misbehaving) -> None:
    server.answer = {"accepted": 1, "stored_blocks": 1, "removed_blocks": 0}
    client = connect(server.url, settings=PATIENT)
    server.script = [503]
    with pytest.raises(Unresponsive, match="503"):
        client.events("pod-a", [])
    assert len(server.seen) == 1
    server.script = [503]
    assert client.events("pod-a", [], seq=1).stored_blocks == 1
    assert len(server.seen) == 3


@pytest.mark.parametrize("action", ["garbage", "huge", 302])
def test_what_is_no_answer(connect: Connect, server: Misbehaving, action: Any) -> None:
    server.script = [action]
    client = connect(server.url, settings=ClientSettings(budget_s=20.0, answer_bytes_max=50_000))
    assert client.match(PROMPT).degraded
    assert not client.match(PROMPT).degraded


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_a_refusal_is_told_at_once(connect: Connect, server: Misbehaving, status: int) -> None:
    server.script = [status]
    client = connect(server.url, settings=PATIENT)
    with pytest.raises(Refused, match=f"said {status}") as caught:
        client.match(PROMPT)
    assert (caught.value.status, len(server.seen)) == (status, 1)


def test_route_says_what_the_router_knows(connect: Connect, server: Misbehaving) -> None:
    server.answer = {
        "pod": "b",
        "dp_rank": 1,
        "score": 0.5,
        "policy": "least_loaded",
        "candidates": [
            {"pod": "b", "dp_rank": 1, "score": 0.5, "matched_blocks": 2, "load": None, "reason": "idle"}
        ],
    }
    client = connect(server.url, api_key="secret", settings=PATIENT)
    answer = client.route(
        PROMPT,
        pods=["a", "b"],
        loads={"a": Load(running=3, waiting=1, kv_usage=0.5)},
        policy="least_loaded",
        top_k=2,
    )
    assert (answer.pod, answer.dp_rank, answer.candidates[0].reason, answer.degraded) == (
        "b",
        1,
        "idle",
        False,
    )
    [(method, path, body, headers)] = server.seen
    assert (method, path, headers["authorization"]) == ("POST", "/v1/route", "Bearer secret")
    assert body == {
        "model": "m",
        "lora": "x",
        "token_ids": [1, 2, 3],
        "pods": ["a", "b"],
        "loads": {"a": {"running": 3, "waiting": 1, "kv_usage": 0.5}},
        "policy": "least_loaded",
        "reserve": True,
        "top_k": 2,
    }


def test_chat_is_sent_as_it_is(connect: Connect, server: Misbehaving) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    connect(server.url, settings=PATIENT).match(
        Prompt(model="m", messages=messages, add_generation_prompt=True)
    )
    assert server.seen[0][2] == {"model": "m", "messages": messages, "add_generation_prompt": True}


def state(client: Driver) -> str:
    return client.client.circuit.state.value


def test_circuit(connect: Connect, server: Misbehaving) -> None:
    """Closed, open, half open with one failing trial, half open with one that succeeds, closed."""
    clock = Clock()
    settings = ClientSettings(budget_s=20.0, attempts_max=1, failures_max=3, open_s=1.0)
    client = connect(server.url, settings=settings, clock=clock)
    circuit = client.client.circuit
    server.script = [503, 503, 503]
    for expected in ("closed", "closed", "open"):
        assert client.match(PROMPT).degraded
        assert state(client) == expected
    answer = client.match(PROMPT)
    assert (answer.degraded, "circuit is open" in answer.cause, len(server.seen)) == (True, True, 3)
    with pytest.raises(Unresponsive, match="circuit is open"):
        client.stats()
    assert circuit.turned_away == 2

    clock.now_s += 1.0
    assert state(client) == "half_open"
    server.script = [503]
    assert client.match(PROMPT).degraded
    assert (state(client), len(server.seen)) == ("open", 4)

    clock.now_s += 0.999
    assert client.match(PROMPT).degraded
    assert len(server.seen) == 4
    clock.now_s += 0.001
    assert not client.match(PROMPT).degraded
    assert state(client) == "closed"
    assert circuit.opened == 2


def test_a_success_forgets_earlier_failures(connect: Connect, server: Misbehaving) -> None:
    settings = ClientSettings(budget_s=20.0, attempts_max=1, failures_max=2)
    client = connect(server.url, settings=settings)
    server.script = [503, 200, 503, 200]
    assert [client.match(PROMPT).degraded for _ in range(4)] == [True, False, True, False]
    assert client.client.circuit.opened == 0
