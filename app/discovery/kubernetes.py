"""The pods of a namespace that a label selector chooses, from the Kubernetes API: one list, then a watch.

The protocol is two GETs of one resource and needs no client library:

    GET /api/v1/namespaces/{ns}/pods?labelSelector=..&limit=..      pages; their resourceVersion is where to go on
    GET the same with watch=1&resourceVersion=..                    one JSON object a line, until the server ends it

A watch that ends goes on from the last version seen (bookmarks bring newer ones while nothing happens). A version
that the server has forgotten (410, as an answer or as an event) costs a new list. A connection that died silently
is noticed, since every watch asks to be ended after WATCH_S. On any other failure the picture is kept, the cause is
reported, and the next try follows after a pause that doubles up to PAUSE_S_MAX.

What counts: a pod with an IP that has not run to its end. A deletion, or another uid under the same name, is
certain, and what that pod held is forgotten at once; a pod that is merely not in a new list has a deadline.
Rights that it needs: list and watch of pods in one namespace. The token is read for each request, as
Kubernetes renews it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import httpx
import msgspec

from app.bounded_read import read_at_most
from app.discovery.sightings import Report, Said, Sighting, parse_said, sight
from app.errors import UNDECODABLE, IndexerError, Unresponsive

PAGE_PODS = 250
PAGE_BYTES_MAX = 64 * 1024 * 1024
LINE_BYTES_MAX = 4 * 1024 * 1024  # a stored object has at most 1.5 MiB
WATCH_S = 60
TIMEOUT_S = 10.0
PAUSE_S_MAX = 30.0

_OVER = frozenset({"Succeeded", "Failed"})


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    uid: str = ""
    resource_version: str = ""


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = ""
    pod_ip: str = msgspec.field(name="podIP", default="")


class _Pod(msgspec.Struct, frozen=True):
    metadata: _Meta = _Meta()
    status: _Status = _Status()


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _PodList(msgspec.Struct, frozen=True):
    metadata: _ListMeta
    items: list[_Pod]


class _Change(msgspec.Struct, frozen=True):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class _Failure(msgspec.Struct, frozen=True):
    """The API's `Status`."""

    code: int = 0
    message: str = ""


_list_decoder = msgspec.json.Decoder(_PodList)
_change_decoder = msgspec.json.Decoder(_Change)
_pod_decoder = msgspec.json.Decoder(_Pod)
_failure_decoder = msgspec.json.Decoder(_Failure)


class VersionForgotten(IndexerError):
    """The API server does not know any more what came after a version: 410 Gone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """A folder with `token`, `ca.crt` and `namespace`, as Kubernetes mounts it into a pod; what lacks is none."""

    folder: Path

    def read(self, name: str) -> str | None:
        """Raises Unresponsive when it is there and cannot be read."""
        try:
            return (self.folder / name).read_text().strip()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise Unresponsive(f"{self.folder / name} cannot be read: {error}") from error


class KubernetesPods:
    """`namespace` None is that of the account. Raises InvalidInput for what cannot be asked."""

    def __init__(
        self,
        selector: str,
        *,
        engines: str,
        api_url: str,
        account: Account,
        namespace: str | None,
        interval_s: float,
    ) -> None:
        self.name = f"kubernetes:{selector}"
        self._selector = selector
        self._said: Said = parse_said(engines, place=self.name)
        self._api_url = api_url.rstrip("/")
        self._account = account
        self._namespace = namespace
        self._interval_s = min(interval_s, PAUSE_S_MAX)
        self._pods: dict[str, Sighting] = {}
        self._version = ""

    async def watch(self, report: Report) -> None:
        pause_s = self._interval_s
        while True:
            try:
                async with self._client() as client:
                    await self._list(client, report)
                    pause_s = self._interval_s
                    while True:
                        await self._watch(client, report)
                        report.seen(dict(self._pods))  # as it was, and as of now
            except VersionForgotten:
                await asyncio.sleep(min(self._interval_s, 1.0))
                continue
            except IndexerError as error:
                report.failed(str(error))
            except httpx.HTTPError as error:
                report.failed(f"{self._api_url} does not answer: {error or type(error).__name__}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    # -- the two requests

    async def _list(self, client: httpx.AsyncClient, report: Report) -> None:
        pods: dict[str, Sighting] = {}
        ended: set[str] = set()
        page = ""
        while True:
            more = {"continue": page} if page else {}
            async with self._get(client, {"limit": str(PAGE_PODS), **more}) as response:
                body = await read_at_most(response, PAGE_BYTES_MAX)
            if body is None:
                raise Unresponsive(f"a page of pods has more than {PAGE_BYTES_MAX} bytes")
            try:
                listed = _list_decoder.decode(body)
            except UNDECODABLE as error:
                raise Unresponsive(f"{self._api_url} did not answer with a list of pods: {error}") from error
            for pod in listed.items:
                self._take(pod, pods, ended)
            page = listed.metadata.continue_
            if not page:
                break
        self._pods, self._version = pods, listed.metadata.resource_version
        report.seen(dict(pods), deleted=ended)

    async def _watch(self, client: httpx.AsyncClient, report: Report) -> None:
        """Until the server ends it, which is no fault."""
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(WATCH_S),
        }
        begun_s = asyncio.get_running_loop().time()
        count = 0
        async with self._get(client, query) as response:
            async for line in _lines(response):
                count += 1
                self._follow(line, report)
        if not count and asyncio.get_running_loop().time() - begun_s < 1.0:
            await asyncio.sleep(1.0)  # a server that ends watches at once is not asked in a circle

    def _follow(self, line: bytes, report: Report) -> None:
        """Raises VersionForgotten, or Unresponsive for what is no event."""
        try:
            change = _change_decoder.decode(line)
            if change.type == "ERROR":
                raise _refusal(_failure_decoder.decode(change.object))
            pod = _pod_decoder.decode(change.object)
        except UNDECODABLE as error:
            raise Unresponsive(f"the watch brought what is no event: {error}") from error
        self._version = pod.metadata.resource_version or self._version
        if change.type == "BOOKMARK":
            return
        deleted: set[str] = set()
        before = self._pods.get(pod.metadata.name)
        if change.type == "DELETED":
            self._pods.pop(pod.metadata.name, None)
            deleted.add(pod.metadata.name)
        else:
            self._take(pod, self._pods, deleted)
        # Most changes of a pod are none of ours, and a picture costs time in proportion to all pods.
        if self._pods.get(pod.metadata.name) != before:
            report.seen(dict(self._pods), deleted=deleted)

    def _take(self, pod: _Pod, pods: dict[str, Sighting], ended: set[str]) -> None:
        meta, status = pod.metadata, pod.status
        if status.phase in _OVER:
            pods.pop(meta.name, None)
            ended.add(meta.name)
        elif status.pod_ip:
            pods[meta.name] = sight(meta.name, f"{meta.uid} at {status.pod_ip}", status.pod_ip, self._said)

    # -- HTTP

    def _client(self) -> httpx.AsyncClient:
        verify: ssl.SSLContext | bool = True
        certificate = self._account.folder / "ca.crt"
        if self._api_url.startswith("https:") and certificate.exists():
            try:
                verify = ssl.create_default_context(cafile=str(certificate))
            except (OSError, ssl.SSLError) as error:
                raise Unresponsive(f"{certificate} is no certificate: {error}") from error
        timeout = httpx.Timeout(TIMEOUT_S, read=WATCH_S + TIMEOUT_S)
        return httpx.AsyncClient(timeout=timeout, verify=verify, follow_redirects=False, trust_env=False)

    def _get(self, client: httpx.AsyncClient, query: dict[str, str]) -> _Answer:
        namespace = self._namespace or self._account.read("namespace")
        if not namespace:
            raise Unresponsive("no namespace: neither a setting nor the service account says which")
        token = self._account.read("token") if may_carry_token(self._api_url) else None
        request = client.build_request(
            "GET",
            f"{self._api_url}/api/v1/namespaces/{namespace}/pods",
            params={"labelSelector": self._selector, **query},
            headers={"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})},
        )
        return _Answer(client, request)


def may_carry_token(url: str) -> bool:
    """Only encrypted, or on this machine."""
    parts = urlsplit(url)
    return parts.scheme == "https" or parts.hostname in ("localhost", "127.0.0.1", "::1")


class _Answer:
    """An answer of the API that is 200. Raises VersionForgotten, Unresponsive."""

    def __init__(self, client: httpx.AsyncClient, request: httpx.Request) -> None:
        self._client = client
        self._request = request
        self._response: httpx.Response | None = None

    async def __aenter__(self) -> httpx.Response:
        response = self._response = await self._client.send(self._request, stream=True)
        if response.status_code == 200:
            return response
        try:
            said = await read_at_most(response, LINE_BYTES_MAX)
            failure = _Failure() if said is None else _failure_decoder.decode(said)
        except (*UNDECODABLE, httpx.HTTPError):
            failure = _Failure()
        finally:
            await response.aclose()
        raise _refusal(_Failure(response.status_code, failure.message))

    async def __aexit__(self, *_: object) -> None:
        if self._response is not None:
            await self._response.aclose()


def _refusal(failure: _Failure) -> IndexerError:
    if failure.code == 410:
        return VersionForgotten(failure.message)
    hints = {
        401: "; the token is not accepted",
        403: "; the service account needs list and watch of pods (deploy/k8s/rbac.yaml)",
    }
    return Unresponsive(
        f"the Kubernetes API answered {failure.code}: {failure.message or 'no reason given'}"
        f"{hints.get(failure.code, '')}"
    )


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    rest = bytearray()
    async for chunk in response.aiter_bytes():
        rest += chunk
        *lines, last = bytes(rest).split(b"\n")
        rest = bytearray(last)
        if len(rest) > LINE_BYTES_MAX:
            raise Unresponsive(f"an event of the watch has more than {LINE_BYTES_MAX} bytes")
        for line in lines:
            if line.strip():
                yield line
