"""The real application with a clock that tests move, called in this process.

Every test that uses it runs twice: with the short way in front of the framework, and without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar
from urllib.parse import unquote

import httpx
import pytest

from app.config import Settings, load_settings
from app.main import Application, create_app
from app.service import IndexerService

Result = TypeVar("Result")


class Clock:
    """Seconds that only move when told."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def _server(app: Application) -> Any:
    """What app/serving/short_connections.py does with requests that have come whole, as an ASGI application."""
    cut = app.short_cut
    assert cut is not None

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break

        async def again() -> Any:
            return {"type": "http.request", "body": body}

        request = None
        if scope["method"] == "POST" and len(body) <= cut.body_bytes_max:
            request = cut.find(scope["path"], scope["query_string"], scope["headers"])
        answer = None
        if request is not None:
            answer = cut.take(request, memoryview(body), opening=b"HTTP/1.1 200 OK\r\n", client=None)
        if isinstance(answer, tuple):
            head, content = answer
            lines = [line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2]]
            await send(
                {"type": "http.response.start", "status": 200, "headers": [tuple(line) for line in lines]}
            )
            await send({"type": "http.response.body", "body": content})
        else:
            await (answer or app)(scope, again, send)

    return serve


class Indexer:
    """An application between its start and its end; every call is one request."""

    def __init__(self, settings: Settings, clock: Clock, *, way: str = "short") -> None:
        self.clock = clock
        self.settings = settings
        self.app: Application = create_app(settings, clock=clock, short_way=way != "long")
        self._runner = asyncio.Runner()
        self._lifespan = self.app.router.lifespan_context(self.app)
        self._runner.run(self._lifespan.__aenter__())
        served: Any = _server(self.app) if way == "cut" else self.app
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(served, raise_app_exceptions=False), base_url="http://indexer"
        )

    @property
    def service(self) -> IndexerService:
        service = self.app.state.wiring.service
        assert isinstance(service, IndexerService)
        return service

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Where several requests are under way at once."""
        return self._runner.run(work)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self._runner.run(self.client.request(method, path, **options))

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.request("POST", path, **({"json": body} if body is not None else {}), **options)

    def raw(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """A request as a server hands it on, which no client library has tidied: status, headers, body."""
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "server": ("indexer", 80),
            "method": method,
            "path": unquote(path),
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        }

        async def call() -> None:
            await self.app(scope, receive, send)

        self._runner.run(call())
        said = {name.decode(): value.decode() for name, value in sent[0].get("headers", ())}
        return sent[0]["status"], said, b"".join(message.get("body", b"") for message in sent[1:])

    def events(self, *events: dict[str, Any], pod: str = "pod-a", **fields: Any) -> httpx.Response:
        return self.post("/v1/events", {"pod": pod, "model": "m", "events": list(events), **fields})

    def depths(self, token_ids: list[int], **fields: Any) -> dict[str, int]:
        """Pod -> matched blocks of one query."""
        response = self.post("/v1/match", {"model": "m", "token_ids": token_ids, **fields})
        assert response.status_code == 200, response.text
        return {row["pod"]: row["matched_blocks"] for row in response.json()["matches"]}

    def picture(self) -> Any:
        """Everything that a refused request must leave as it was."""
        stats = self.service.stats()
        return stats["index"], stats["contexts"], stats["sources"], self.get("/v1/pods").json()

    def close(self) -> None:
        self._runner.run(self.client.aclose())
        self._runner.run(self._lifespan.__aexit__(None, None, None))
        self._runner.close()


@pytest.fixture(params=["short", "long"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_indexer(way: str) -> Iterator[Callable[..., Indexer]]:
    made: list[Indexer] = []

    def make(**settings: Any) -> Indexer:
        indexer = Indexer(load_settings(**settings), Clock(), way=way)
        made.append(indexer)
        return indexer

    yield make
    for indexer in made:
        indexer.close()


@pytest.fixture
def indexer(make_indexer: Callable[..., Indexer]) -> Indexer:
    return make_indexer()


def stored(
    hashes: list[int], token_ids: list[int], *, parent: int | None = None, block_size: int = 4, **fields: Any
) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": token_ids,
        "block_size": block_size,
        **fields,
    }


def removed(*hashes: int, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), **fields}


CLEARED = {"type": "AllBlocksCleared"}
