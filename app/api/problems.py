"""Every error as an RFC 9457 problem object, from one table of exception -> status.

Handlers raise what app/errors.py has; nothing else in app/api names a status for a fault. A fault of ours
is a 500 that says nothing of the inside: the log has it.
"""

from __future__ import annotations

import http
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from app.errors import (
    BatchRejected,
    BodyTooLarge,
    IndexerError,
    InvalidInput,
    LimitExceeded,
    LogAway,
    NoCandidate,
    NoRoom,
    Overloaded,
    SwitchedOff,
    TokenizerUnavailable,
    UnknownOwner,
    UnknownPod,
    UnreadableBatch,
    UnreadableBody,
)
from app.observability.correlation import CURRENT

CONTENT_TYPE = "application/problem+json"

# A batch can have thousands of faults; nobody reads more of them than this.
FAULTS_MAX = 100

# The first class that fits counts, so a child stands before its parent.
STATUSES: tuple[tuple[type[IndexerError], int, str], ...] = (
    (UnreadableBody, 400, "unreadable-body"),
    (UnreadableBatch, 400, "unreadable-batch"),
    (InvalidInput, 422, "invalid-input"),
    (UnknownPod, 404, "unknown-pod"),
    (UnknownOwner, 404, "unknown-owner"),
    (NoCandidate, 404, "no-candidate"),
    (BodyTooLarge, 413, "body-too-large"),
    (LimitExceeded, 422, "limit-exceeded"),
    (SwitchedOff, 501, "switched-off"),
    (NoRoom, 503, "no-room"),
    (Overloaded, 503, "overloaded"),
    (LogAway, 503, "log-away"),
    (TokenizerUnavailable, 503, "tokenizer-unavailable"),
)

Faults = Sequence[tuple[str, str]]


def install(app: FastAPI) -> None:
    """Makes every error of `app` a problem object."""
    app.add_exception_handler(IndexerError, _indexer_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _sender_left)
    app.add_exception_handler(Exception, _our_fault)


def problem(
    status: int,
    slug: str,
    detail: str,
    *,
    faults: Faults = (),
    bound: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    content = _content(status, slug, detail, faults, bound)
    return _answer(content, headers)


def content_of(error: IndexerError) -> dict[str, Any]:
    """The problem object of an error that is not an answer of its own. An error that has no status is raised."""
    row = next((row for row in STATUSES if isinstance(error, row[0])), None)
    if row is None:
        raise error
    _, status, slug = row
    faults: Faults = [("", str(error))]
    if isinstance(error, BatchRejected):
        faults = [(f"events[{event.index}]", event.detail) for event in error.rejected]
    elif isinstance(error, InvalidInput):
        faults = error.faults
    elif isinstance(error, UnknownPod):
        faults = [("pod", str(error))]
    bound = error.bound if isinstance(error, LimitExceeded) else None
    return _content(status, slug, str(error), faults, bound)


def _content(status: int, slug: str, detail: str, faults: Faults, bound: str | None) -> dict[str, Any]:
    content: dict[str, Any] = {
        "type": f"urn:kvindexer:problem:{slug}",
        "title": http.HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "errors": [{"field": field, "detail": said} for field, said in faults[:FAULTS_MAX]],
    }
    if bound is not None:
        content["bound"] = bound
    return content


def _answer(content: dict[str, Any], headers: dict[str, str] | None) -> JSONResponse:
    correlation = CURRENT.get()
    if correlation is not None:
        content["request_id"] = correlation.request_id
    return JSONResponse(content, content["status"], headers, media_type=CONTENT_TYPE)


def place(location: Sequence[int | str]) -> str:
    """A path of keys and indexes as one text: ("events", 2, "type") is events[2].type."""
    text = ""
    for step in location:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


async def _indexer_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, IndexerError)
    return problem_of(error)


def problem_of(error: IndexerError) -> JSONResponse:
    """Raises `error` again when it is none that a sender can cause."""
    content = content_of(error)
    headers = None
    if isinstance(error, BodyTooLarge):
        # The rest of the body is not read, so nothing more can be understood on this connection.
        headers = {"Connection": "close"}
    elif isinstance(error, NoRoom):
        headers = {"Retry-After": "1", "Connection": "close"}
    elif isinstance(error, (Overloaded, LogAway, TokenizerUnavailable)):
        headers = {"Retry-After": "1"}
    return _answer(content, headers)


async def _validation_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    faults = [(place(fault["loc"][1:]), fault["msg"]) for fault in error.errors()]
    return problem(422, "invalid-input", sentence(faults), faults=faults)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    phrase = http.HTTPStatus(error.status_code).phrase
    detail = str(error.detail)
    headers = dict(error.headers) if error.headers else None
    if error.status_code == http.HTTPStatus.METHOD_NOT_ALLOWED:
        headers = {"Allow": ", ".join(_methods(request))}
    slug = phrase.lower().replace(" ", "-")
    return problem(error.status_code, slug, detail, faults=[("", detail)], headers=headers)


def _methods(request: Request) -> list[str]:
    """All methods of the path: each of them is a route of its own, and the framework names the first one's."""

    def is_taken(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [
        method for method in ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT") if is_taken(method)
    ]


async def _sender_left(_request: Request, _error: Exception) -> Response:
    """Nobody reads this; the status is for the metrics, where a sender that leaves is no fault of ours."""
    return Response(status_code=499)


async def _our_fault(_request: Request, _error: Exception) -> JSONResponse:
    return fault_of_ours()


def fault_of_ours() -> JSONResponse:
    detail = "a fault of the indexer; its log says which"
    return problem(500, "internal", detail, faults=[("", detail)])


def sentence(faults: Faults) -> str:
    """The faults in one line; at most three are spelt out."""
    said = "; ".join(f"{field}: {detail}" if field else detail for field, detail in faults[:3])
    return said + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
