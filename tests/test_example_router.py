"""examples/router.py in front of simulated pods and a real indexer: repeated prompts go to the pod that has them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.config import load_settings
from app.main import create_app as create_indexer
from app.simulator.engine_settings import EngineSettings
from app.simulator.fleet import Fleet, FleetSettings
from app.simulator.kv_cache import KVCacheSettings
from app.simulator.pod import PodSettings
from examples.router import create_app
from tests.client.conftest import served

README = Path(__file__).parent.parent / "README.md"
BLOCK_SIZE = 4
DEADLINE_S = 20.0


def on_a_loop(test: Callable[[str], Coroutine[Any, Any, None]]) -> Callable[[str], None]:
    @functools.wraps(test)
    def run(indexer_url: str) -> None:
        asyncio.run(test(indexer_url))

    return run


@pytest.fixture
def indexer_url() -> Iterator[str]:
    with served(create_indexer(load_settings())) as url:
        yield url


class Site:
    """A fleet of simulated pods behind the example router."""

    def __init__(self, http: httpx.AsyncClient, fleet: Fleet, indexer: httpx.AsyncClient) -> None:
        self.http = http
        self.fleet = fleet
        self.indexer = indexer

    async def complete(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        response = await self.http.post(path, json={"model": "simulated", "max_tokens": 1, **body})
        assert response.status_code == 200, response.text
        return response

    async def seen(self, pod: str) -> None:
        """Returns when the indexer has applied all that the pod published."""
        [published] = [rank.next_seq for run in self.fleet.pods if run.name == pod for rank in run.pod.ranks]
        async with asyncio.timeout(DEADLINE_S):
            while True:
                ranks = (await self.indexer.get(f"/v1/pods/{pod}")).json()["ranks"]
                if ranks[0]["last_seq"] == published - 1:
                    return
                await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def site(indexer_url: str, *, asked_url: str | None = None, pods: int = 3) -> AsyncIterator[Site]:
    """The router asks the indexer at `asked_url`."""
    cache = KVCacheSettings(capacity_pages=1_000, block_size=BLOCK_SIZE)
    pod = PodSettings(name="pod", model="simulated", speed=float("inf"), engine=EngineSettings(cache=cache))
    async with Fleet(FleetSettings(pods=pods, pod=pod, indexer_url=indexer_url)) as fleet:
        app = create_app(asked_url or indexer_url, {run.name: run.url for run in fleet.pods}, "simulated")
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://router", timeout=30.0
            ) as http,
            httpx.AsyncClient(base_url=indexer_url) as indexer,
        ):
            yield Site(http, fleet, indexer)


def words(prompt: int, count: int = 40) -> str:
    return " ".join(f"w{prompt * 1_000 + place}" for place in range(count))


def cached_tokens(response: httpx.Response) -> int:
    cached: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


@on_a_loop
async def test_repeated_prompts_go_to_the_pod_that_has_them(indexer_url: str) -> None:
    async with site(indexer_url) as running:
        first = {}
        for prompt in range(9):
            answer = await running.complete(prompt=words(prompt))
            assert cached_tokens(answer) == 0
            first[prompt] = answer.headers["x-pod"]
            await running.seen(first[prompt])
        assert len(set(first.values())) == 3, "new prompts are spread over all pods"
        for prompt in reversed(range(9)):
            answer = await running.complete(prompt=words(prompt))
            assert (answer.headers["x-pod"], cached_tokens(answer)) == (first[prompt], 36)


@on_a_loop
async def test_a_burst_of_equal_prompts_stays_together(indexer_url: str) -> None:
    """The choice is announced, so the second is sent after the first before any event came."""
    async with site(indexer_url) as running:
        pods = {(await running.complete(prompt=words(1))).headers["x-pod"] for _ in range(4)}
        assert len(pods) == 1


@on_a_loop
async def test_a_conversation_stays_where_it_began(indexer_url: str) -> None:
    async with site(indexer_url) as running:
        messages = [{"role": "user", "content": words(1)}]
        pods = []
        for turn in range(4):
            answer = await running.complete("/v1/chat/completions", messages=messages, max_tokens=8)
            pods.append(answer.headers["x-pod"])
            await running.seen(pods[-1])
            if turn:
                assert cached_tokens(answer) > 30
            messages += [
                answer.json()["choices"][0]["message"],
                {"role": "user", "content": words(turn + 2, 5)},
            ]
        assert len(set(pods)) == 1


@on_a_loop
async def test_token_ids_and_streams_pass_through(indexer_url: str) -> None:
    async with site(indexer_url) as running:
        answer = await running.complete(prompt=list(range(40)))
        await running.seen(answer.headers["x-pod"])
        body = {"model": "simulated", "prompt": list(range(40)), "max_tokens": 5, "stream": True}
        async with running.http.stream("POST", "/v1/completions", json=body) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert stream.headers["x-pod"] == answer.headers["x-pod"]
            lines = [line async for line in stream.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[0].removeprefix("data: "))["choices"]
        assert (await running.http.get("/v1/models")).json()["data"][0]["id"] == "simulated"


@on_a_loop
async def test_without_an_indexer_every_request_is_served(indexer_url: str) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
    async with site(indexer_url, asked_url=nobody) as running:
        pods = [(await running.complete(prompt=words(1))).headers["x-pod"] for _ in range(6)]
        assert sorted(pods) == sorted(["pod-0", "pod-1", "pod-2"] * 2), "in turn"


@on_a_loop
async def test_what_a_pod_refuses_is_passed_through(indexer_url: str) -> None:
    async with site(indexer_url, pods=1) as running:
        bodies: list[Any] = [{"model": "unknown", "prompt": "x"}, {"model": "simulated"}, {"prompt": 7}, []]
        for body in bodies:
            response = await running.http.post("/v1/completions", json=body)
            assert (response.status_code, "error" in response.json()) in {(400, True), (404, True)}
        response = await running.http.post("/v1/completions", content=b"{")
        assert response.status_code == 400


@on_a_loop
async def test_a_pod_that_is_gone_is_passed_over(indexer_url: str) -> None:
    async with site(indexer_url) as running:
        answer = await running.complete(prompt=words(1))
        await running.seen(answer.headers["x-pod"])
        [gone] = [run for run in running.fleet.pods if run.name == answer.headers["x-pod"]]
        await gone.stop()
        for _ in range(6):
            served_by = (await running.complete(prompt=words(1))).headers["x-pod"]
            assert served_by != gone.name


def test_the_command_of_the_readme_is_understood() -> None:
    """Its options, with the fleet's own names and ports."""
    [command] = re.findall(r"python (examples/router\.py[^\n]*(?:\\\n[^\n]*)*)", README.read_text())
    arguments = command.replace("\\\n", " ").split()
    root = README.parent
    done = subprocess.run(
        [sys.executable, *arguments, "--help"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, "--indexer" in done.stdout) == (0, True), done.stderr
