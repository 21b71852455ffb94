"""A real redis-server on a free port of loopback, without a disk unless it is asked to have one; and a way to it that
can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

DEADLINE_S = 20.0


def executable() -> str:
    """Skips the test where there is none; fails it in CI."""
    found = shutil.which("redis-server")
    if found is None:
        assert not os.environ.get("CI"), "CI has a redis-server"
        pytest.skip("redis-server is not installed")
    return found


class RedisServer:
    """Started at once. `kill` is SIGKILL; `start` comes back on the same port."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._folder = folder
        self._arguments = arguments
        self.port = _free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = [executable(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        command += ["--save", "", "--loglevel", "warning", *self._arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                with redis.Redis(port=self.port, socket_timeout=1) as client:
                    client.ping()
                return
            except redis.ConnectionError:
                assert self.process.poll() is None, "redis-server runs"
                assert time.monotonic() < deadline_s, "redis-server answers"
                time.sleep(0.01)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """It neither answers nor closes a connection meanwhile."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()


@contextlib.contextmanager
def serving_redis(*arguments: str) -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder), *arguments)
        try:
            yield server
        finally:
            server.end()


class Way:
    """A proxy to a server. While it is `cut`, nothing passes and nothing is closed: packets are lost, as it seems."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    def cut(self) -> None:
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, there_writer))
                both.create_task(self._pump(there_reader, writer))
        except* OSError:
            pass
        finally:
            self._tasks.discard(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65_536):
                await self._open.wait()
                sink.write(data)
                await sink.drain()
        finally:
            sink.close()

    async def end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def way_to(port: int) -> AsyncIterator[Way]:
    way = Way(port)
    server = await asyncio.start_server(way.carry, "127.0.0.1", 0)
    way.port = server.sockets[0].getsockname()[1]
    try:
        yield way
    finally:
        server.close()
        await way.end()


def _free_port() -> int:
    """One whose cluster bus, 10,000 further on, has a free port too."""
    while True:
        with socket.socket() as taken, socket.socket() as bus:
            taken.bind(("127.0.0.1", 0))
            port = int(taken.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                bus.bind(("127.0.0.1", port + 10_000))
                return port
