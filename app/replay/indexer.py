"""The indexer under test, seen through its public HTTP interface only; started here when no URL is given."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import select
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any, Self

import httpx

from app.child_command import child_command
from app.config import variable
from app.errors import InvalidInput, Unresponsive

POLL_INTERVAL_S = 0.002
START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class StreamPosition:
    """How far a (pod, rank) has been applied: a match sees everything up to here."""

    last_seq: int | None
    restarts: int
    state: str


class IndexerUnderTest:
    """Calls raise Unresponsive when nobody answers and InvalidInput when the indexer refuses."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 30.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def has_pod(self, pod: str) -> bool:
        response = self._send("GET", _pod_path(pod))
        return response.status_code != httpx.codes.NOT_FOUND and bool(self._checked(response))

    def register(self, pod: str, body: dict[str, Any]) -> None:
        self._accepted("PUT", _pod_path(pod), body)

    def drop(self, pod: str) -> None:
        self._accepted("DELETE", _pod_path(pod))

    def positions(self, pod: str) -> dict[int, StreamPosition]:
        ranks = self._accepted("GET", _pod_path(pod))["ranks"]
        return {
            rank["dp_rank"]: StreamPosition(rank["last_seq"], rank["restarts"], rank["state"])
            for rank in ranks
        }

    def reusable_tokens(
        self, *, model: str, lora: str | None, cache_salt: str | None, pod: str, token_ids: Sequence[int]
    ) -> dict[int, int]:
        """By rank; a rank that holds nothing of the prompt is left out."""
        answer = self._accepted(
            "POST",
            "/v1/match",
            {
                "model": model,
                "lora": lora,
                "token_ids": list(token_ids),
                "cache_salt": cache_salt,
                "pods": [pod],
            },
        )
        return {row["dp_rank"]: row["reusable_tokens"] for row in answer["matches"] if row["pod"] == pod}

    def _accepted(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._checked(self._send(method, path, body))

    @staticmethod
    def _checked(response: httpx.Response) -> Any:
        if response.is_error:
            asked = response.request
            raise InvalidInput(
                f"{asked.method} {asked.url.path}: {response.status_code} {response.text[:500]}"
            )
        return response.json() if response.content else None

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            return self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise Unresponsive(f"no answer from the indexer at {self._http.base_url}: {error}") from error


def _pod_path(pod: str) -> str:
    return f"/v1/pods/{urllib.parse.quote(pod, safe='')}"


@contextlib.contextmanager
def own_indexer(**settings: object) -> Iterator[str]:
    """The URL of an indexer started for this one check, on a free port, and stopped after it.

    `settings` are on top of those of the environment.
    """
    environment = {**os.environ, **{variable(name): str(value) for name, value in settings.items()}}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            child_command("app", "serve", "--host", "127.0.0.1", "--port", "0"),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        try:
            deadline = time.monotonic() + START_DEADLINE_S
            url = _announced_url(process, deadline)
            if url is None or not _is_ready(process, url, deadline):
                log.seek(0)
                said = log.read()[-2_000:].decode(errors="replace")
                raise Unresponsive(f"the indexer did not start; it said:\n{said}")
            yield url
        finally:
            process.terminate()
            try:
                process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _announced_url(process: subprocess.Popen[bytes], deadline_s: float) -> str | None:
    """The address in the one line that the indexer prints; None when it ends or is silent."""
    assert process.stdout is not None, "the indexer is started with a pipe"
    readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
    line = process.stdout.readline().decode() if readable else ""
    found = re.search(r"http://\S+", line)
    return found.group() if found else None


def _is_ready(process: subprocess.Popen[bytes], url: str, deadline_s: float) -> bool:
    with httpx.Client(base_url=url, timeout=1.0) as http:
        while time.monotonic() < deadline_s and process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if http.get("/readyz").status_code == httpx.codes.OK:
                    return True
            time.sleep(0.05)
    return False
