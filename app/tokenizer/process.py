"""One child process that tokenises: started when first asked, killed when it does not answer in time.

One prompt at a time, over a pair of sockets. Whatever ends a call before its answer was read whole (time is up,
the caller is cancelled, the child is gone) ends the child too: the next call starts another, so an answer can
never be taken for that of another prompt.

The child is started on a thread, and not by the event loop: a loop forks, which copies the page tables of a large
index while nothing else runs; subprocess.Popen does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import subprocess

import msgspec

from app.child_command import child_command
from app.config import LogFormat, LogLevel
from app.errors import TokenizerUnavailable
from app.tokenizer.prompts import LENGTH, Answer, Job

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Answer)


@dataclasses.dataclass(frozen=True, slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class TokenizerProcess:
    """`starts` counts the children that were started."""

    def __init__(
        self,
        *,
        tokenizers_max: int,
        timeout_s: float,
        log_level: LogLevel = "info",
        log_format: LogFormat = "console",
    ) -> None:
        self.starts = 0
        self._arguments = (str(tokenizers_max), log_level, log_format)
        self._timeout_s = timeout_s
        self._child: _Child | None = None

    @property
    def pid(self) -> int | None:
        """None while no child runs."""
        return None if self._child is None else self._child.process.pid

    async def ask(self, job: Job) -> Answer:
        """Raises TokenizerUnavailable. The caller makes one call at a time."""
        answered = False
        try:
            if self._child is None:
                self._child = await self._start()
            async with asyncio.timeout(self._timeout_s):
                answer = await _exchange(self._child, _encoder.encode(job))
            answered = True
            return answer
        except TimeoutError:
            detail = f"the tokenizer took longer than tokenizer_timeout_s = {self._timeout_s:g} s"
            raise TokenizerUnavailable(detail) from None
        except (EOFError, OSError) as error:
            raise TokenizerUnavailable(f"the tokenizer's process ended: {error}; the log has more") from None
        finally:
            if not answered:
                await self.close()

    async def close(self) -> None:
        """Ends the child, which has nothing to lose."""
        child, self._child = self._child, None
        if child is None:
            return
        child.writer.close()
        with contextlib.suppress(OSError):
            await child.writer.wait_closed()
        await _end(child.process)

    async def _start(self) -> _Child:
        self.starts += 1
        ours, theirs = socket.socketpair()
        starting = asyncio.ensure_future(asyncio.to_thread(_open, theirs, self._arguments))
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            ours.close()
            await _end(await starting)
            raise
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        return _Child(process, reader, writer)


def _open(theirs: socket.socket, arguments: tuple[str, ...]) -> subprocess.Popen[bytes]:
    command = child_command("app.tokenizer.worker", *arguments)
    return subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno())


async def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    await asyncio.to_thread(process.wait)


async def _exchange(child: _Child, payload: bytes) -> Answer:
    child.writer.write(LENGTH.pack(len(payload)))
    child.writer.write(payload)
    await child.writer.drain()
    (length,) = LENGTH.unpack(await child.reader.readexactly(LENGTH.size))
    return _decoder.decode(await child.reader.readexactly(length))
