"""A TCP proxy between an indexer and its Redis that can be made to drop, to hold or to refuse.

It accepts by itself: asyncio.Server, closed while it is accepting a connection, leaves that one open and lets nobody
know (Python 3.11), and whoever is refused knocks all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from typing import Any


class Proxy:
    """`mode` is "pass", "drop" (bytes of both directions vanish, of old connections and new ones), "hold" (they wait, and
    come late: packets that are sent again until the way is open) or "refuse"."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._mode = "pass"
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: socket.socket | None = None
        self.port = 0
        self._call(self._listen())

    def _call(self, work: Any) -> None:
        future: Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.result(timeout=10)

    async def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._loop.add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # it went again
            accepted, _ = listener.accept()
            self._begin(self._serve(accepted))

    def _refuse(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def set(self, mode: str) -> None:
        self._call(self._set(mode))

    async def _set(self, mode: str) -> None:
        assert mode in ("pass", "drop", "hold", "refuse"), mode
        before, self._mode = self._mode, mode
        if mode == "hold":
            self._flowing.clear()
        else:
            self._flowing.set()
        if mode == "refuse":
            self._refuse()
        # What was dropped cannot be made up for: as with a real network, TCP would have ended such connections.
        if mode == "refuse" or before == "drop":
            for writer in list(self._writers):
                writer.transport.abort()
        if before == "refuse":
            await self._listen()

    async def _serve(self, accepted: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=accepted)
        if self._mode == "refuse":  # since it was accepted
            writer.transport.abort()
            return
        self._writers.add(writer)
        try:
            onward_reader, onward = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(onward)
        for pair in ((reader, onward), (onward_reader, writer)):
            self._begin(self._pump(*pair))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                await self._flowing.wait()
                if self._mode == "pass":
                    writer.write(data)
                    await writer.drain()
        writer.transport.abort()
        self._writers.discard(writer)

    def close(self) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    async def _end(self) -> None:
        """Whatever is still connecting, waiting or flowing comes to its end before the loop does."""
        self._refuse()
        await asyncio.sleep(0)  # a task that is cancelled before it begins would close nothing
        while tasks := set(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)


@contextlib.contextmanager
def proxied(target: int) -> Iterator[Proxy]:
    proxy = Proxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
