"""A redis-server of a test's own: on a free port of loopback, with its data in a folder of the test."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

START_S = 20.0
ANSWER_S = 1.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """Started at once, stopped at the end of `with`; `start` comes back on the same port, with what is on disk in
    memory again.

    `keep`: every command is on disk before it is answered, so a kill loses nothing. `tls`: it speaks nothing else.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: bool = False,
        tls: bool = False,
        password: str = "",
        options: tuple[str, ...] = (),
    ) -> None:
        program = shutil.which("redis-server")
        if program is None:
            assert not os.environ.get("CI"), "redis-server is missing: see .ci/run"
            pytest.skip("redis-server is not installed")
        self.port = free_port()
        self._password = password
        self._command = [
            program,
            *(("--port", "0", "--tls-port", str(self.port)) if tls else ("--port", str(self.port))),
            *("--bind", "127.0.0.1", "--dir", str(folder)),
            *("--save", "", "--appendonly", "yes" if keep else "no", "--appendfsync", "always"),
            *("--requirepass", password),
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        password = f":{self._password}@" if self._password else ""
        return f"redis://{password}127.0.0.1:{self.port}/0"

    def start(self) -> None:
        assert self._process is None, "it runs already"
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, "redis-server ended at once"
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.02)

    def _answers(self) -> bool:
        """It listens well before it has loaded what is on disk, and until then answers nothing but errors."""
        once = Retry(NoBackoff(), 0)
        with redis.Redis.from_url(self.url, socket_timeout=ANSWER_S, retry=once) as client:
            try:
                return bool(client.ping())
            except (redis.ConnectionError, redis.TimeoutError):
                return False

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        if self._process is not None:
            self._end(signal.SIGTERM)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """It neither answers nor closes a connection meanwhile."""
        assert self._process is not None, "it does not run"
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        assert self._process is not None, "it does not run"
        self._process.send_signal(number)
        self._process.wait(timeout=START_S)
        self._process = None

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)


@contextlib.contextmanager
def serving_redis(*, keep: bool = False, options: tuple[str, ...] = ()) -> Iterator[RedisServer]:
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(Path(folder), keep=keep, options=options) as server,
    ):
        yield server


def cluster_options() -> tuple[str, ...]:
    """For a node of a cluster: its bus on a free port too."""
    return ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
