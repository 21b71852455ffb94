"""The HTTP face of simulated pods, over loopback, and the command that starts them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.errors import InvalidSettings, Unresponsive
from app.simulator.engine_settings import EngineSettings
from app.simulator.fleet import Fleet, FleetSettings
from app.simulator.kv_cache import KVCacheSettings
from app.simulator.pod import PodSettings

Test = Callable[[httpx.AsyncClient, Fleet], Awaitable[None]]


def with_pod(test: Test, **more: Any) -> None:
    """Run the test against one pod with blocks of 4."""
    pod = {"name": "pod", "model": "m", "adapters": ("adapter",), "speed": float("inf"), **more}
    pod.setdefault("engine", EngineSettings(cache=KVCacheSettings(capacity_pages=50, block_size=4)))

    async def run() -> None:
        fleet = Fleet(FleetSettings(pods=1, pod=PodSettings(**pod)))
        async with fleet, httpx.AsyncClient(timeout=20.0) as http:
            http.base_url = httpx.URL(fleet.pods[0].url)
            await test(http, fleet)

    asyncio.run(run())


async def complete(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await http.post("/v1/completions", json={"max_tokens": 2, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def cached(answer: dict[str, Any]) -> int:
    details: dict[str, int] = answer["usage"]["prompt_tokens_details"]
    return details["cached_tokens"]


def events(stream: str) -> list[Any]:
    parts = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


def test_completion_reports_what_was_cached() -> None:
    async def test(http: httpx.AsyncClient, _: Fleet) -> None:
        first = await complete(http, prompt=list(range(10)), return_token_ids=True)
        assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert first["usage"]["total_tokens"] == 12
        choice = first["choices"][0]
        assert choice["text"] == " ".join(f"w{token}" for token in choice["token_ids"])
        assert choice["prompt_token_ids"] == list(range(10))
        assert cached(await complete(http, prompt=[list(range(10))])) == 8
        assert cached(await complete(http, prompt=list(range(10)), cache_salt="tenant")) == 0
        assert cached(await complete(http, prompt=list(range(10)), model="adapter")) == 0
        assert cached(await complete(http, prompt=list(range(10)), model="adapter")) == 8

    with_pod(test)


def test_chat_that_is_continued_finds_its_own_answer_cached() -> None:
    async def test(http: httpx.AsyncClient, _: Fleet) -> None:
        messages = [{"role": "user", "content": "one two three four five six"}]
        body = {"messages": messages, "max_tokens": 9}
        first = (await http.post("/v1/chat/completions", json=body)).json()
        said = first["choices"][0]["message"]
        assert said["role"] == "assistant"
        follow = [*messages, said, {"role": "user", "content": [{"type": "text", "text": "and then"}]}]
        second = (await http.post("/v1/chat/completions", json={**body, "messages": follow})).json()
        # All but the last answered token was computed: 9 of the prompt and 8 of the answer.
        assert (first["usage"]["prompt_tokens"], cached(second)) == (9, 16)

    with_pod(test)


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        ("/v1/completions", {"prompt": "one two"}, lambda choice: choice["text"]),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "one two"}]},
            lambda choice: choice["delta"]["content"],
        ),
    ],
)
def test_stream_adds_up_to_the_whole_answer(path: str, body: dict[str, Any], part: Any) -> None:
    async def test(http: httpx.AsyncClient, _: Fleet) -> None:
        asked = {**body, "max_tokens": 4}
        whole = (await http.post(path, json=asked)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = await http.post(path, json={**asked, **options})
        assert response.headers["content-type"].startswith("text/event-stream")
        *parts, last = events(response.text)
        text = "".join(part(chunk["choices"][0]) for chunk in parts)
        choice = whole["choices"][0]
        assert text == (choice["text"] if "text" in choice else choice["message"]["content"])
        assert [chunk["choices"][0]["finish_reason"] for chunk in parts] == [None] * 3 + ["length"]
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)

    with_pod(test)


def test_client_that_leaves_a_stream_aborts_its_request() -> None:
    async def test(http: httpx.AsyncClient, fleet: Fleet) -> None:
        engine = fleet.pods[0].pod.ranks[0].engine
        body = {"prompt": [1, 2, 3], "max_tokens": 150, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_bytes())
            assert engine.stats().running == 1
        for _ in range(2_000):
            if not engine.stats().running:
                break
            await asyncio.sleep(0.005)
        assert (engine.stats().running, engine.stats().finished) == (0, 0)

    with_pod(test, speed=1.0)


def test_stream_of_a_pod_that_crashes_says_so_and_ends() -> None:
    async def test(http: httpx.AsyncClient, fleet: Fleet) -> None:
        body = {"prompt": [1, 2, 3], "max_tokens": 150, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            parts = response.aiter_lines()
            await anext(parts)
            await fleet.pods[0].pod.crash()
            rest = [part async for part in parts if part]
        assert "died" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]

    with_pod(test, speed=1.0)


def test_operator_routes() -> None:
    async def test(http: httpx.AsyncClient, fleet: Fleet) -> None:
        assert (await http.get("/health")).status_code == 200
        models = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == ["m", "adapter"]
        tokens = (await http.post("/tokenize", json={"prompt": "w7 w8"})).json()
        assert (tokens["count"], tokens["tokens"]) == (2, [7, 8])
        sources = (await http.get("/kv_event_sources")).json()
        assert list(sources) == ["0", "1"]
        assert sources["0"]["endpoint"] == fleet.pods[0].pod.zmq_endpoint
        port = int(sources["0"]["endpoint"].rpartition(":")[2])
        assert sources["1"]["endpoint"].endswith(f":{port + 1}")
        await complete(http, prompt=list(range(10)))
        assert (await http.post("/reset_prefix_cache")).json() == {"success": True}
        assert cached(await complete(http, prompt=list(range(10)))) == 0

    with_pod(test, dp_size=2)


def test_rank_can_be_asked_for() -> None:
    async def test(http: httpx.AsyncClient, _: Fleet) -> None:
        async def ask(rank: str) -> httpx.Response:
            headers = {"X-data-parallel-rank": rank}
            body = {"prompt": list(range(10)), "max_tokens": 1}
            return await http.post("/v1/completions", json=body, headers=headers)

        assert [cached((await ask(rank)).json()) for rank in ("1", "0", "1", "0")] == [0, 0, 8, 8]
        assert (await ask("2")).status_code == 400
        assert (await ask("x")).status_code == 400

    with_pod(test, dp_size=2)


def test_metrics_have_the_names_of_the_engine() -> None:
    async def test(http: httpx.AsyncClient, _: Fleet) -> None:
        for _repeat in range(2):
            await complete(http, prompt=list(range(10)))
        families = text_string_to_metric_families((await http.get("/metrics")).text)
        values = {sample.name: sample for family in families for sample in family.samples}
        assert values["vllm:prefix_cache_queries_total"].value == 20
        assert values["vllm:prefix_cache_hits_total"].value == 8
        assert values["vllm:generation_tokens_total"].value == 4
        assert values["vllm:num_requests_running"].value == 0
        assert values["vllm:request_success_total"].labels["finished_reason"] == "length"
        assert values["vllm:cache_config_info"].labels["block_size"] == "4"
        assert values["vllm:time_to_first_token_seconds_count"].value == 2
        assert values["vllm:num_requests_waiting"].labels == {"engine": "0", "model_name": "m"}

    with_pod(test, speed=1000.0)


@pytest.mark.parametrize(
    ("body", "status", "complaint"),
    [
        ({}, 400, "prompt"),
        ({"prompt": []}, 400, "at least one token"),
        ({"prompt": ["a", "b"]}, 400, "one prompt a request"),
        ({"prompt": [[1], 2]}, 400, "one prompt a request"),
        ({"prompt": [-1]}, 400, "token ids"),
        ({"prompt": [1], "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": [1], "max_tokens": 1_000_000}, 400, "max_tokens"),
        ({"prompt": list(range(300))}, 400, "capacity_pages"),
        ({"prompt": [1], "model": "other"}, 404, "other"),
    ],
)
def test_refusals_look_like_the_engines(body: dict[str, Any], status: int, complaint: str) -> None:
    async def test(http: httpx.AsyncClient, _: Fleet) -> None:
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == status
        assert complaint in response.json()["error"]["message"]
        assert (await http.get("/health")).status_code == 200

    with_pod(test)


def test_crashed_pod_answers_nothing_until_it_is_started_again() -> None:
    async def test(http: httpx.AsyncClient, fleet: Fleet) -> None:
        await complete(http, prompt=list(range(10)))
        endpoint = fleet.pods[0].pod.zmq_endpoint
        assert not (await http.post("/faults", json={"action": "crash"})).json()["up"]
        for path in ("/health", "/metrics", "/kv_event_sources"):
            assert (await http.get(path)).status_code == 503
        assert (await http.post("/v1/completions", json={"prompt": [1]})).status_code == 503
        started = (await http.post("/faults", json={"action": "start"})).json()
        assert (started["up"], started["ranks"][0]["next_seq"]) == (True, 0)
        assert fleet.pods[0].pod.zmq_endpoint == endpoint
        assert cached(await complete(http, prompt=list(range(10)))) == 0

    with_pod(test)


def test_faults_are_set_and_read_back() -> None:
    async def test(http: httpx.AsyncClient, _: Fleet) -> None:
        wanted = {"dp_rank": 1, "drop_next": 3, "duplicate_next": 2, "lag_s": 0.5, "truncate_replays": 1}
        ranks = (await http.post("/faults", json=wanted)).json()["ranks"]
        assert ranks[0]["drop_next"] == 0
        assert ranks[1] == {"dp_rank": 1, "next_seq": 0, "drop_next": 3, "duplicate_next": 2, "lag_s": 0.5}
        assert (await http.get("/faults")).json()["ranks"] == ranks
        for wrong in ({"drop_next": -1}, {"dp_rank": 2}, {"action": "explode"}, {"unknown": 1}):
            assert (await http.post("/faults", json=wrong)).status_code == 400
        assert (await http.get("/faults")).json()["ranks"] == ranks

    with_pod(test, dp_size=2)


def test_running_request_keeps_the_cache_from_being_reset() -> None:
    async def test(http: httpx.AsyncClient, fleet: Fleet) -> None:
        body = {"prompt": [1, 2, 3], "max_tokens": 100, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_bytes())
            assert (await http.post("/reset_prefix_cache")).json() == {"success": False}

    with_pod(test, speed=1.0)


def test_fleet_without_its_indexer_says_so() -> None:
    async def run() -> None:
        async with Fleet(FleetSettings(pods=1, indexer_urls=("http://127.0.0.1:1",))):
            pass

    with pytest.raises(Unresponsive, match="no answer"):
        asyncio.run(run())
    with pytest.raises(InvalidSettings, match="pods"):
        Fleet(FleetSettings(pods=0))


# -- the command


def test_command_lists_its_pods_and_ends_on_a_signal() -> None:
    command = [sys.executable, "-m", "app", "simulate", "--pods", "2", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pods = json.loads(process.stdout.readline())
        assert [pod["pod"] for pod in pods] == ["pod-0", "pod-1"]
        answer = httpx.post(f"{pods[1]['url']}/v1/completions", json={"prompt": "a b", "max_tokens": 1})
        assert answer.status_code == 200
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert (process.returncode, said) == (0, "")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [(["--form", "SMOKE"], "MAPS_0_33"), (["--publish-http"], "--indexer"), (["--pods", "0"], "--pods")],
)
def test_command_refuses_what_cannot_be(options: list[str], complaint: str) -> None:
    command = [sys.executable, "-m", "app", "simulate", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert complaint in done.stderr
