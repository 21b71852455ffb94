"""Those who ask rightly: one connection that is kept, routers with every body, and one that measures the event loop.

A call tells whether it met a bound (503 with a problem that says so); every other 5xx is a violation, and so is a
refusal of what is right. A connection that breaks while the indexer ends or starts is neither.
"""

from __future__ import annotations

import array
import contextlib
import http.client
import itertools
import random
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from app import hashing
from benchmarks.soak.findings import Findings
from benchmarks.soak.pods import BLOCK, MODEL, Documents
from benchmarks.soak.server import Server

TIMEOUT_S = 30.0


class Keys:
    """The keys file: one key to read, one to write, and one that changes with each rotation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read = "soak-reader-key-0123456789"
        self.write = "soak-writer-key-0123456789"
        self._rotations = 0
        self.passing = ""
        self.rotate()

    def rotate(self) -> str:
        """Returns the key that is good no more."""
        gone = self.passing
        self._rotations += 1
        self.passing = f"soak-passing-key-{self._rotations:010d}"
        text = f"# soak\n{self.read}:read\n{self.write}:write\n{self.passing}:read\n"
        made = self.path.with_suffix(".new")
        made.write_text(text)
        made.replace(self.path)
        return gone


class Caller:
    """One keep-alive connection to the indexer; belongs to one thread."""

    def __init__(self, server: Server, key: str, findings: Findings) -> None:
        self._server = server
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._findings = findings
        self._connection: http.client.HTTPConnection | None = None

    def call(
        self, method: str, target: str, body: bytes | None = None, kind: str = "", accept: str = ""
    ) -> tuple[int, bytes]:
        """Raises OSError or HTTPException where there is no answer."""
        connection = self._connection or http.client.HTTPConnection(
            "127.0.0.1", self._server.port, timeout=TIMEOUT_S
        )
        headers = dict(self._headers)
        if kind:
            headers["Content-Type"] = kind
        if accept:
            headers["Accept"] = accept
        self._connection = None
        try:
            connection.request(method, target, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            raise
        if answer.will_close:
            connection.close()
        else:
            self._connection = connection
        judge_status(self._findings, answer.status, content, f"{method} {target}")
        return answer.status, content

    def post(self, target: str, body: bytes, kind: str) -> tuple[int, bytes]:
        return self.call("POST", target, body, kind)

    def ask(self, method: str, target: str, body: bytes | None = None, kind: str = "") -> Any:
        """The answer as an object; tried again for as long as a bound is met or nobody answers."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                status, content = self.call(method, target, body, kind)
                if status == 200:
                    return msgspec.json.decode(content)
                if status != 503:
                    raise AssertionError(f"{method} {target} was refused: {status} {content[:300]!r}")
            assert time.monotonic() < deadline_s, f"{method} {target} had no answer for {TIMEOUT_S:g} s"
            time.sleep(0.02)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def judge_status(findings: Findings, status: int, content: bytes, request: str) -> None:
    """503 is declared where it says why; other 5xx never are."""
    findings.count(f"answers {status}")
    if status < 500:
        return
    kind = re.search(rb'"urn:kvindexer:problem:([a-z-]+)"', content)
    is_declared = status == 503 and kind is not None
    findings.count(f"answers {status} {kind[1].decode() if kind else 'unsaid'}")
    if not is_declared:
        findings.violation("5xx", f"{request}: {status} {content[:1_000]!r}")


def packed(token_ids: Iterable[int]) -> bytes:
    return array.array("I", token_ids).tobytes()


class Forms:
    """One question in every body; each returns matched blocks by pod."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.all: dict[str, Callable[[list[int]], dict[str, int]]] = {
            "tokens as JSON": lambda tokens: self._json({"token_ids": tokens}),
            "hashes as JSON": lambda tokens: self._json({"prefix_hashes": self._hashes(tokens)}),
            "tokens as octets": lambda tokens: self._octets(packed(tokens), ""),
            "hashes as octets": lambda tokens: self._octets(self._packed_hashes(tokens), "&hashes=true"),
            "tokens as msgpack": self._msgpack,
            "with hashes answered": lambda tokens: self._json({"token_ids": tokens, "include_hashes": True}),
            "batch": self._batch,
        }

    def _hashes(self, tokens: list[int]) -> list[int]:
        return array.array("Q", self._packed_hashes(tokens)).tolist()

    def _packed_hashes(self, tokens: list[int]) -> bytes:
        return hashing.prefix_hashes(MODEL, None, BLOCK, packed(tokens))

    def _json(self, fields: dict[str, Any]) -> dict[str, int]:
        body = msgspec.json.encode({"model": MODEL, **fields})
        return depths(self._answer("/v1/match", body, "application/json"))

    def _octets(self, body: bytes, query: str) -> dict[str, int]:
        return depths(self._answer(f"/v1/match?model={MODEL}{query}", body, "application/octet-stream"))

    def _msgpack(self, tokens: list[int]) -> dict[str, int]:
        body = msgspec.msgpack.encode({"model": MODEL, "token_ids": tokens})
        return depths(self._answer("/v1/match", body, "application/msgpack"))

    def _batch(self, tokens: list[int]) -> dict[str, int]:
        query = {"model": MODEL, "token_ids": tokens}
        body = msgspec.json.encode({"queries": [query, {**query, "top_k": 1}]})
        return depths(self._answer("/v1/match/batch", body, "application/json")["results"][0])

    def _answer(self, target: str, body: bytes, kind: str) -> Any:
        return self._caller.ask("POST", target, body, kind)


def depths(answer: Any) -> dict[str, int]:
    return {row["pod"]: row["matched_blocks"] for row in answer["matches"]}


class Background:
    """Threads that run until they are told to end; what ends one of them is a violation."""

    def __init__(self, findings: Findings) -> None:
        self.ending = threading.Event()
        self._findings = findings
        self._threads: list[threading.Thread] = []

    def add(self, name: str, step: Callable[[], None], pause_s: float) -> None:
        """`step` again and again, once all are started."""

        def run() -> None:
            is_orderly = False
            try:
                while not self.ending.is_set():
                    step()
                    self.ending.wait(pause_s)
                is_orderly = True
            finally:
                if not is_orderly:
                    self._findings.violation("soak", f"{name} ended with the traceback above")

        self._threads.append(threading.Thread(target=run, name=name))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Returns when all have ended; harmless when repeated."""
        self.ending.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()


class Router:
    """Asks in every form in turn, also for a route, a fuzzy match and the pods."""

    def __init__(
        self, server: Server, keys: Keys, findings: Findings, documents: Documents, seed: int
    ) -> None:
        self._server = server
        self._caller = Caller(server, keys.read, findings)
        self._findings = findings
        self._documents = documents
        self._draw = random.Random(seed)
        self._kinds = itertools.cycle(range(8))

    def step(self) -> None:
        if not self._server.is_up.is_set():
            self._caller.close()
            self._server.is_up.wait(0.1)
            return
        tokens = self._documents.question(self._draw)
        method, target, body, kind = self._request(next(self._kinds), tokens)
        starts = self._server.starts
        began_s = time.monotonic()
        try:
            status, content = self._caller.call(method, target, body, kind)
        except (OSError, http.client.HTTPException) as error:
            if self._server.is_up.is_set() and self._server.starts == starts:
                self._findings.count("routers' connections broken")
            if not isinstance(error, ConnectionError | http.client.HTTPException):
                self._findings.violation("no answer", f"{method} {target}: {error!r}")
            return
        if status == 200:
            self._findings.sample("query", time.monotonic() - began_s)
            self._findings.count("queries answered")
            self._check(target, content, len(tokens) // BLOCK)
        elif status != 503:
            self._findings.violation("refused", f"{method} {target}: {status} {content[:300]!r}")

    def _request(self, number: int, tokens: list[int]) -> tuple[str, str, bytes, str]:
        octets, model = "application/octet-stream", urllib.parse.quote(MODEL)
        hashes = hashing.prefix_hashes(MODEL, None, BLOCK, packed(tokens))
        match number:
            case 0:
                return "POST", f"/v1/match?model={model}", packed(tokens), octets
            case 1:
                return "POST", f"/v1/match?model={model}&hashes=true", hashes, octets
            case 2:
                query = {"model": MODEL, "prefix_hashes": array.array("Q", hashes).tolist()}
                return "POST", "/v1/match", msgspec.json.encode(query), "application/json"
            case 3:
                query = {"model": MODEL, "token_ids": tokens}
                return "POST", "/v1/match", msgspec.msgpack.encode(query), "application/msgpack"
            case 4:
                query = {"model": MODEL, "token_ids": tokens}
                return "POST", "/v1/route", msgspec.json.encode(query), "application/json"
            case 5:
                query = {"model": MODEL, "token_ids": tokens}
                return (
                    "POST",
                    "/v1/match/batch",
                    msgspec.json.encode({"queries": [query] * 4}),
                    "application/json",
                )
            case 6:
                query = {"model": MODEL, "token_ids": tokens[:512]}
                return "POST", "/v1/fuzzy-match", msgspec.json.encode(query), "application/json"
        query = {"model": MODEL, "token_ids": tokens}
        return "POST", "/v1/match", msgspec.json.encode(query), "application/json"

    def _check(self, target: str, content: bytes, blocks: int) -> None:
        if target.startswith("/v1/match?") or target == "/v1/match":
            answer = msgspec.json.decode(content) if content[:1] == b"{" else msgspec.msgpack.decode(content)
            if answer["blocks"] != blocks or any(depth > blocks for depth in depths(answer).values()):
                self._findings.violation("impossible answer", f"{target}: {content[:500]!r}")

    def close(self) -> None:
        self._caller.close()


class Prober:
    """`/healthz` needs nothing but the event loop: how long it takes is how long the loop was busy."""

    def __init__(self, server: Server, findings: Findings) -> None:
        self._server = server
        self._caller = Caller(server, "", findings)
        self._findings = findings

    def step(self) -> None:
        if not self._server.is_up.is_set():
            self._caller.close()
            self._server.is_up.wait(0.1)
            return
        began_s = time.monotonic()
        with contextlib.suppress(OSError, http.client.HTTPException):
            if self._caller.call("GET", "/healthz")[0] == 200 and self._server.is_up.is_set():
                self._findings.sample("loop", time.monotonic() - began_s)

    def close(self) -> None:
        self._caller.close()
