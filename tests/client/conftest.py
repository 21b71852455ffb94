"""Real servers on free ports: the indexer itself, and one that misbehaves on request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.client import AsyncClient, Client, ClientSettings
from app.config import load_settings
from app.main import create_app

PATIENT = ClientSettings(budget_s=20.0)


@contextlib.contextmanager
def served(application: Any) -> Iterator[str]:
    """Its URL, on a thread of its own."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0), backlog=128)) as listener:
        # A test ends its clients first, so nothing is left to wait for but what is meant to hang.
        config = uvicorn.Config(
            application, log_level="error", timeout_graceful_shutdown=1, ws="none", access_log=False
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive(), "the server ends"


@pytest.fixture
def url() -> Iterator[str]:
    with served(create_app(load_settings())) as running:
        yield running


@dataclasses.dataclass
class Misbehaving:
    """What the next responses are: a status (with a fitting body), "hang", "drip", "garbage" or "huge".

    Past the script everything is answered well. `seen` are (method, path, decoded body, headers) of every request.
    """

    url: str = ""
    script: list[Any] = dataclasses.field(default_factory=list)
    retry_after: str = ""
    seen: list[tuple[str, str, Any, dict[str, str]]] = dataclasses.field(default_factory=list)
    answer: Any = dataclasses.field(
        default_factory=lambda: {
            "model": "m",
            "lora": None,
            "block_size": 4,
            "tokens": 9,
            "blocks": 2,
            "matches": [],
        }
    )
    released: threading.Event = dataclasses.field(default_factory=threading.Event)

    async def respond(self, request: Request) -> Response:
        body = await request.body()
        decode = (
            msgspec.json.decode
            if request.headers.get("content-type") == "application/json"
            else msgspec.msgpack.decode
        )
        self.seen.append(
            (request.method, request.url.path, decode(body) if body else None, dict(request.headers))
        )
        action = self.script.pop(0) if self.script else 200
        if action == "hang":
            await asyncio.to_thread(self.released.wait)  # until the test is over
        if action == "garbage":
            return Response(b"\xc1not an answer", media_type="application/msgpack")
        if action == "huge":
            return Response(b"\0" * 100_000, media_type="application/msgpack")
        if isinstance(action, int) and action != 200:
            problem = msgspec.json.encode({"title": "t", "status": action, "detail": f"said {action}"})
            headers = {"retry-after": self.retry_after} if self.retry_after else None
            return Response(problem, action, headers, media_type="application/problem+json")
        accept = request.headers["accept"]
        encode = msgspec.json.encode if accept == "application/json" else msgspec.msgpack.encode
        return Response(encode(self.answer), media_type=accept)


@pytest.fixture
def server() -> Iterator[Misbehaving]:
    state = Misbehaving()
    routes = [Route("/{path:path}", state.respond, methods=["GET", "POST", "PUT", "DELETE"])]
    with served(Starlette(routes=routes)) as running:
        state.url = running
        try:
            yield state
        finally:
            state.released.set()


class Driver:
    """The same calls on either client: the tests know no difference."""

    def __init__(self, client: Client | AsyncClient) -> None:
        self.client = client
        self._runner = asyncio.Runner() if isinstance(client, AsyncClient) else None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            made = getattr(self.client, name)(*arguments, **options)
            return made if self._runner is None else self._runner.run(made)

        return call

    def end(self) -> None:
        self.close()
        if self._runner is not None:
            self._runner.close()


@pytest.fixture(params=[Client, AsyncClient], ids=["blocking", "asynchronous"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Driver]]:
    made: list[Driver] = []

    def make(url: str, **options: Any) -> Driver:
        driver = Driver(request.param(url, **{"settings": PATIENT, **options}))
        made.append(driver)
        return driver

    yield make
    for driver in made:
        driver.end()
