"""examples/router.py in front of simulated pods and a real indexer: repeated prompts go to the pod that has them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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
DEADLINE_S = 90.0


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
    async with Fleet(FleetSettings(pods=pods, pod=pod, indexer_urls=(indexer_url,))) as fleet:
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


def free_ports(count: int) -> list[int]:
    """In a row: the fleet's pods lie so."""
    for _ in range(50):
        with contextlib.ExitStack() as held:
            first = held.enter_context(
                contextlib.closing(socket.create_server(("127.0.0.1", 0)))
            ).getsockname()[1]
            try:
                for offset in range(1, count):
                    held.enter_context(
                        contextlib.closing(socket.create_server(("127.0.0.1", first + offset)))
                    )
            except (OSError, OverflowError):
                continue
            return list(range(first, first + count))
    raise AssertionError(f"no {count} free ports in a row")


def readme_commands() -> dict[str, list[str]]:
    """The three commands of the section, by their first word but one, on ports that are free here."""
    section = README.read_text().split("## A router in front of your pods", 1)[1]
    block = section.split("```sh\n", 1)[1].split("```", 1)[0]
    ports = dict(
        zip(
            ["8080", "8000", "9000", "9001", "9002"],
            [*free_ports(1), *free_ports(1), *free_ports(3)],
            strict=True,
        )
    )
    for written, port in ports.items():
        block = re.sub(rf"\b{written}\b", str(port), block)
    commands = {}
    for line in block.splitlines():
        program, name, *rest = line.split()
        start = [sys.executable, "-m", "app", name] if program == "kvindexer" else [sys.executable, name]
        commands[name] = [*start, *rest]
    return commands


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(
        command, cwd=README.parent, env={**os.environ, "PYTHONPATH": "."}, stdout=subprocess.DEVNULL
    )
    try:
        yield
        assert process.poll() is None, f"{command} goes on"
    finally:
        process.terminate()
        process.wait(30)


def wait_for(url: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url).is_success:
                return
        assert time.monotonic() < deadline_s, f"{url} answers"
        time.sleep(0.05)


def test_the_commands_of_the_readme() -> None:
    commands = readme_commands()
    router = commands["examples/router.py"]
    indexer = router[router.index("--indexer") + 1]
    url = f"http://127.0.0.1:{router[router.index('--port') + 1]}"
    with started(commands["serve"]):
        wait_for(f"{indexer}/readyz")
        with started(commands["simulate"]):
            wait_for(f"{indexer}/v1/pods/pod-2")
            with started(router):
                wait_for(f"{url}/v1/models")
                body = {"model": "simulated", "max_tokens": 1, "prompt": words(1, 200)}
                answers = [
                    httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S) for _ in range(3)
                ]
    assert len({answer.headers["x-pod"] for answer in answers}) == 1
    assert [cached_tokens(answer) for answer in answers] == [0, 192, 192]


@on_a_loop
async def test_ids_of_a_request_go_along_to_the_indexer(indexer_url: str) -> None:
    seen: list[dict[str, str]] = []

    async def note(request: Request) -> Response:
        seen.append(dict(request.headers))
        return Response(b"", 404)

    ids = {"x-request-id": "r-1", "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    with served(Starlette(routes=[Route("/v1/route", note, methods=["POST"])])) as asked_url:
        async with site(indexer_url, asked_url=asked_url) as running:
            body = {"model": "simulated", "max_tokens": 1, "prompt": words(1)}
            for headers in (ids, {}):
                answer = await running.http.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200
    first, second = seen
    assert ids.items() <= first.items()
    assert not ids.keys() & second.keys()
