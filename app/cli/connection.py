"""The indexer that a command talks to: its address, the key, and each failure as one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self
from urllib.parse import quote

import httpx
import typer

from app.errors import IndexerError, InvalidInput, Unresponsive

DEFAULT_URL = "http://127.0.0.1:8080"
TIMEOUT_S = 30.0

Url = Annotated[str, typer.Option("--url", envvar="KVINDEXER_URL", help="The indexer.", metavar="URL")]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="KVINDEXER_API_KEY", help="A key, where the indexer asks for one."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="One JSON document on standard output, and nothing else there.")
]


class Connection:
    """Raises Unresponsive when nobody answers and InvalidInput when the indexer refuses."""

    def __init__(self, url: str, api_key: str | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S)
        except httpx.InvalidURL as error:
            raise typer.BadParameter(f"{url!r}: {error}", param_hint="--url") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str) -> Any:
        return self._call("GET", path)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._call("POST", path, json=body)

    def post_text(self, path: str, body: bytes) -> Any:
        """A body that is JSON already."""
        return self._call("POST", path, content=body, headers={"Content-Type": "application/json"})

    def put(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._call("PUT", path, json=body)

    def delete(self, path: str) -> Any:
        return self._call("DELETE", path)

    @contextlib.contextmanager
    def stream(self, path: str, *, params: Mapping[str, Any], endless: bool) -> Iterator[httpx.Response]:
        """An answer to be read as it comes; an endless one may be silent for as long as it likes."""
        timeout = httpx.Timeout(TIMEOUT_S, read=None if endless else TIMEOUT_S)
        with self._faults(path), self._http.stream("GET", path, params=params, timeout=timeout) as response:
            if response.is_error:
                response.read()
                raise _refusal(response)
            yield response

    def _call(self, method: str, path: str, **options: Any) -> Any:
        with self._faults(path):
            response = self._http.request(method, path, **options)
        if response.is_error:
            raise _refusal(response)
        return response.json() if response.content else None

    @contextlib.contextmanager
    def _faults(self, path: str) -> Iterator[None]:
        try:
            yield
        except httpx.UnsupportedProtocol as error:
            raise typer.BadParameter(str(error), param_hint="--url") from error
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise Unresponsive(f"no answer from {self._http.base_url} to {path}: {why}") from error


def pod_path(name: str) -> str:
    return f"/v1/pods/{quote(name, safe='')}"


def _refusal(response: httpx.Response) -> IndexerError:
    try:
        detail = response.json()["detail"]
    except (ValueError, KeyError, TypeError):
        detail = response.text[:500]
    return InvalidInput(f"the indexer refuses ({response.status_code}): {detail}")
