"""One child process that tokenises: started when first asked, killed when it does not answer in time.

One prompt at a time. Whatever ends a call before its answer was read whole (time is up, the caller is
cancelled, the child is gone) ends the child too: the next call starts another, so an answer can never be
taken for that of another prompt.
"""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import sys

import msgspec

from app.errors import TokenizerUnavailable
from app.tokenizer.prompts import LENGTH, Answer, Job

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Answer)


class TokenizerProcess:
    """`starts` counts the children that were started."""

    def __init__(self, *, tokenizers_max: int, timeout_s: float) -> None:
        self.starts = 0
        self._tokenizers_max = tokenizers_max
        self._timeout_s = timeout_s
        self._child: asyncio.subprocess.Process | None = None

    async def ask(self, job: Job) -> Answer:
        """Raises TokenizerUnavailable. The caller makes one call at a time."""
        answered = False
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._child is None:
                    self._child = await self._start()
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
        assert child.stdin is not None, "the child is started with a pipe"
        child.stdin.close()
        if child.returncode is None:
            child.kill()
        await child.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        self.starts += 1
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "app.tokenizer.worker",
            str(self._tokenizers_max),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )


async def _exchange(child: asyncio.subprocess.Process, payload: bytes) -> Answer:
    assert child.stdin is not None, "the child is started with pipes"
    assert child.stdout is not None, "the child is started with pipes"
    child.stdin.write(LENGTH.pack(len(payload)))
    child.stdin.write(payload)
    await child.stdin.drain()
    (length,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
    return _decoder.decode(await child.stdout.readexactly(length))
