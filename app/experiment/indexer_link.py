"""The indexer as an experiment sees it: events in, routes out, over one HTTP connection.

A policy is asked some 12,000 times and told of as many batches, one after the other, since each answer
depends on what was told before. So this is the plainest connection there is (http.client, msgpack bodies,
0.1 ms a call), and a fault ends the experiment: it is never tried again behind the reader's back.
"""

from __future__ import annotations

import array
import http.client
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from app.errors import InvalidInput, Unresponsive

TIMEOUT_S = 60.0
_MSGPACK = "application/msgpack"


class Candidate(msgspec.Struct, frozen=True):
    pod: str
    matched_blocks: int


class Route(msgspec.Struct, frozen=True):
    """The chosen pod is the first candidate."""

    pod: str
    block_size: int
    candidates: list[Candidate]


_route_decoder = msgspec.msgpack.Decoder(Route)


class IndexerLink:
    """Raises Unresponsive when nobody answers and InvalidInput when the indexer refuses."""

    def __init__(self, url: str, model: str, *, api_key: str | None = None) -> None:
        address = urllib.parse.urlsplit(url)
        if address.scheme not in ("http", "https") or address.hostname is None:
            raise InvalidInput(f"{url!r} is not the address of an indexer", field="url")
        self.url = url
        self.model = model
        connect = http.client.HTTPConnection if address.scheme == "http" else http.client.HTTPSConnection
        self._http = connect(address.hostname, address.port, timeout=TIMEOUT_S)
        self._headers = {"Content-Type": _MSGPACK, "Accept": _MSGPACK}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def register(self, pod: str, block_size: int) -> None:
        body = msgspec.msgpack.encode({"model": self.model, "block_size": block_size})
        self._call("PUT", f"/v1/pods/{urllib.parse.quote(pod, safe='')}", body)

    def drop(self, pod: str) -> None:
        self._call("DELETE", f"/v1/pods/{urllib.parse.quote(pod, safe='')}", b"")

    def publish(self, pod: str, seq: int, payload: bytes) -> None:
        """When it returns, a route sees the blocks."""
        query = urllib.parse.urlencode({"pod": pod, "model": self.model, "seq": seq})
        answer = msgspec.msgpack.decode(self._call("POST", f"/v1/events?{query}", payload))
        if answer["rejected"] or answer["orphans"]:
            raise InvalidInput(f"the indexer could not use a batch of {pod}: {answer}")

    def route(
        self, token_ids: msgspec.Raw, policy: str, pods: Sequence[str], loads: Mapping[str, Any]
    ) -> Route:
        """`token_ids` is a msgpack array."""
        body = msgspec.msgpack.encode(
            {
                "model": self.model,
                "token_ids": token_ids,
                "policy": policy,
                "pods": pods,
                "loads": loads,
                "reserve": False,
            }
        )
        return _route_decoder.decode(self._call("POST", "/v1/route", body))

    def _call(self, method: str, path: str, body: bytes) -> bytes:
        try:
            self._http.request(method, path, body or None, self._headers)
            response = self._http.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unresponsive(f"no answer from the indexer at {self.url}: {error}") from error
        if response.status >= 400:
            said = content[:500].decode(errors="replace")
            raise InvalidInput(f"{method} {path.partition('?')[0]}: {response.status} {said}")
        return content


def packed_token_ids(token_ids: array.array[int]) -> msgspec.Raw:
    """Tokens below 128 are one byte each in msgpack: an array is its length (array 32) and they."""
    return msgspec.Raw(b"\xdd" + len(token_ids).to_bytes(4, "big") + bytes(token_ids.tolist()))
