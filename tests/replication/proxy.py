"""A TCP proxy between an indexer and its Redis that can be made to drop, to hold or to refuse."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
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
        self._server: asyncio.Server | None = None
        self.port = 0
        self._call(self._listen())

    def _call(self, work: Any) -> None:
        future: Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.result(timeout=10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

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
            assert self._server is not None
            self._server.close()
        # What was dropped cannot be made up for: as with a real network, TCP would have ended such connections.
        if mode == "refuse" or before == "drop":
            for writer in list(self._writers):
                writer.transport.abort()
        if before == "refuse":
            await self._listen()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            onward_reader, onward = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(onward)
        for pair in ((reader, onward), (onward_reader, writer)):
            task = asyncio.create_task(self._pump(*pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

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
        if self._server is not None:
            self._server.close()
        while others := asyncio.all_tasks(self._loop) - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
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
