"""Who may do what, and how often: in front of everything that answers, the short way included.

A request needs a key when there are keys: `Authorization: Bearer <key>`. OPEN is what nobody needs one for: the two
probes, and the files that the dashboard is made of, which are in every copy of this project. The page at `/` itself is
shown to a browser without a key together with the 401, because it is where a key is typed in.

The scope is decided here from method and path alone, by the very `scope["path"]` that the routes are found by, so no
spelling of a path can be one route for this and another for them. Nothing is granted that is not listed: whatever
is no GET and not in READ_POSTS needs `write`, routes that do not exist yet included. Each key has a bucket of
requests; without keys, all share one.

Refused without reading a body: 401, 403 and 429, each with the headers of RFC 6750 and RFC 9110, and no word of the key.
Cost of a request that is let through: docs/security.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from fastapi import Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.problems import problem
from app.auth.api_keys import Scope as KeyScope
from app.auth.key_ring import RATE, SMALL_SCOPE, UNKNOWN_KEY, WITHOUT_KEY, Bucket, KeyRing

OPEN = frozenset({"/healthz", "/readyz"})
OPEN_FILES = "/dashboard/"
READ_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
READ_POSTS = frozenset(
    {
        "/v1/match",
        "/v1/match/batch",
        "/v1/route",
        "/v1/hashes",
        "/v1/fuzzy-match",
        "/query",
        "/query_by_hash",
        "/lookup",
    }
)

# Where the handlers find whether the request's key may write; absent where no key is needed.
MAY_WRITE = "kvindexer.may_write"


CHALLENGE = 'Bearer realm="kvindexer"'

Page = Callable[[dict[str, str]], Response]


class Admission(NamedTuple):
    may_write: bool
    bucket: Bucket


class Access:
    """`page` is the dashboard's, to be sent with these headers."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing, clock: Callable[[], float], page: Page) -> None:
        self._app = app
        self._keys = keys
        self._bucket = keys.new_bucket()  # everybody's, where no key is needed
        self._clock = clock
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # Nothing here is a websocket. The lifespan is the server's own.
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})
            return
        refusal = self._refusal(scope)
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def admit(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Admission | None:
        """Who sends a request that is let through, as far as its rate allows; None: `__call__` refuses it, or not."""
        if not self._keys.is_needed:
            return Admission(True, self._bucket)
        key = _bearer(headers)
        caller = None if key is None else self._keys.find(key)
        if caller is None or (needed_scope(method, path) is not KeyScope.READ and not caller.may_write):
            return None
        return Admission(caller.may_write, caller.bucket)

    def _refusal(self, scope: Scope) -> Response | None:
        needed = needed_scope(scope["method"], scope["path"])
        if needed is None:
            return None
        bucket = self._bucket
        if self._keys.is_needed:
            key = _bearer(scope["headers"])
            if key is None:
                return self._no_key(scope)
            caller = self._keys.find(key)
            if caller is None:
                self._keys.count(UNKNOWN_KEY)
                return _unauthorized("the key is not known", ', error="invalid_token"')
            if needed is KeyScope.WRITE and not caller.may_write:
                self._keys.count(SMALL_SCOPE)
                return _forbidden()
            scope[MAY_WRITE] = caller.may_write
            bucket = caller.bucket
        if bucket.is_endless:
            return None
        wait_s = bucket.take(self._clock())
        return None if wait_s == 0.0 else self._too_many(wait_s)

    def _no_key(self, scope: Scope) -> Response:
        self._keys.count(WITHOUT_KEY)
        if scope["path"] == "/" and scope["method"] in ("GET", "HEAD") and _is_for_people(scope["headers"]):
            return self._page({"WWW-Authenticate": CHALLENGE})
        return _unauthorized("a key is needed: Authorization: Bearer <key>", "")

    def _too_many(self, wait_s: float) -> Response:
        self._keys.count(RATE)
        detail = "more requests than rate_requests_per_s allows this key"
        headers = {"Retry-After": str(math.ceil(wait_s))}
        return problem(
            429,
            "too-many-requests",
            detail,
            faults=[("", detail)],
            bound="rate_requests_per_s",
            headers=headers,
        )


def needed_scope(method: str, path: str) -> KeyScope | None:
    """The least scope for a request; None when it needs no key."""
    if path in OPEN:
        return None
    if method in READ_METHODS:
        return None if path.startswith(OPEN_FILES) else KeyScope.READ
    if method == "POST" and path in READ_POSTS:
        return KeyScope.READ
    return KeyScope.WRITE


def may_write(request: Request) -> bool:
    """For what a route that may be read does beside reading."""
    return bool(request.scope.get(MAY_WRITE, True))


def _forbidden() -> Response:
    detail = "the key has the scope read, and this needs write"
    headers = {"WWW-Authenticate": f'{CHALLENGE}, error="insufficient_scope", scope="write"'}
    return problem(403, "forbidden", detail, faults=[("", detail)], headers=headers)


def _unauthorized(detail: str, more: str) -> Response:
    headers = {"WWW-Authenticate": CHALLENGE + more}
    return problem(401, "unauthorized", detail, faults=[("", detail)], headers=headers)


def _bearer(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The one key that the request carries; None without one, and for two of them."""
    said = None
    for name, value in headers:
        if name == b"authorization":
            if said is not None:
                return None
            said = value
    if said is None or said[:7].lower() != b"bearer ":
        return None
    return said[7:].strip() or None


def _is_for_people(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name == b"accept" and b"text/html" in value.lower() for name, value in headers)
