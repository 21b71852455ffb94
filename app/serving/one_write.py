"""Answers in one write. uvicorn writes the head and the body of an answer separately, and each write is a system call.

The second one is a fifth of what a match by hashes costs the server. So the transport that uvicorn sees keeps a head
back until the body comes, which is nearly always at once, and hands both on together. A head whose body is late
(a stream that waits for its first event) goes out alone in the loop's next round; nothing is kept back longer, and
the order of bytes never changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

JOINED_BYTES_MAX = 65_536  # of a body: a larger one costs more to copy than a call


class OneWriteProtocol(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(OneWriteTransport(transport, self.loop))


class OneWriteTransport(asyncio.Transport):
    """What uvicorn uses of a transport, around a real one."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None
        self._flushing: asyncio.Handle | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        head = self._head
        if head is not None:
            self._forget()
            if len(data) <= JOINED_BYTES_MAX:
                data = head + data
            else:
                self._transport.write(head)
        elif isinstance(data, bytes) and data.startswith(b"HTTP/1.") and data.endswith(b"\r\n\r\n"):
            self._head = data
            self._flushing = self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def writelines(self, pieces: Iterable[bytes]) -> None:  # type: ignore[override]
        """In one call, and no piece is kept back."""
        self._flush()
        self._transport.writelines(pieces)

    def _flush(self) -> None:
        head = self._head
        if head is not None:
            self._forget()
            if not self._transport.is_closing():
                self._transport.write(head)

    def _forget(self) -> None:
        assert self._flushing is not None, "a head that is kept back is flushed soon"
        self._flushing.cancel()
        self._head = self._flushing = None

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        if self._head is not None:
            self._forget()
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + len(self._head or b"")

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._flush()
        self._transport.set_protocol(protocol)
