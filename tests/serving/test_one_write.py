"""Head and body of an answer go out together, in order, and neither waits for the other. Over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from app.serving.one_write import JOINED_BYTES_MAX, OneWriteTransport

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"
BODY = b"body"


def over_sockets(act: Callable[[OneWriteTransport, socket.socket], Awaitable[None]]) -> None:
    """`act` gets a transport and the other end of its connection, which does not block."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        near, far = socket.socketpair()
        far.setblocking(False)
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=near)
        try:
            await act(OneWriteTransport(transport, loop), far)
        finally:
            transport.close()
            far.close()
            await asyncio.sleep(0)

    asyncio.run(run())


def sent(far: socket.socket) -> bytes:
    """What has arrived by now."""
    try:
        return far.recv(1 << 20)
    except BlockingIOError:
        return b""


def test_head_waits_for_its_body() -> None:
    async def act(transport: OneWriteTransport, far: socket.socket) -> None:
        transport.write(HEAD)
        assert sent(far) == b""
        transport.write(BODY)
        assert sent(far) == HEAD + BODY
        transport.write(HEAD)  # of the next answer on the connection
        transport.write(b"")
        assert sent(far) == HEAD

    over_sockets(act)


def test_head_without_a_body_goes_out_in_the_next_round() -> None:
    async def act(transport: OneWriteTransport, far: socket.socket) -> None:
        transport.write(HEAD)
        await asyncio.sleep(0)
        assert sent(far) == HEAD
        transport.write(BODY)
        assert sent(far) == BODY

    over_sockets(act)


def test_a_large_body_is_not_copied_and_comes_behind_its_head() -> None:
    async def act(transport: OneWriteTransport, far: socket.socket) -> None:
        large = b"x" * (JOINED_BYTES_MAX + 1)
        transport.write(HEAD)
        transport.write(large)
        received = b""
        while len(received) < len(HEAD) + len(large):
            received += await asyncio.get_running_loop().sock_recv(far, 1 << 20)
        assert received == HEAD + large

    over_sockets(act)


def test_close_sends_what_is_kept_back_and_abort_does_not() -> None:
    async def close(transport: OneWriteTransport, far: socket.socket) -> None:
        transport.write(HEAD)
        transport.close()
        assert transport.is_closing()
        assert sent(far) == HEAD

    async def abort(transport: OneWriteTransport, far: socket.socket) -> None:
        transport.write(HEAD)
        transport.abort()
        await asyncio.sleep(0)
        assert sent(far) == b""

    over_sockets(close)
    over_sockets(abort)


@pytest.mark.parametrize("other", [BODY, b"HTTP/1.1 400 Bad Request\r\n\r\nwhy", b"HTTP/1.1 cut"])
def test_what_is_no_head_alone_is_not_kept_back(other: bytes) -> None:
    async def act(transport: OneWriteTransport, far: socket.socket) -> None:
        transport.write(other)
        assert sent(far) == other

    over_sockets(act)
