"""`kvindexer serve` as a child of the demo: started, waited for, and gone when the block is left, whatever happens.

It has a process group of its own, so that a Ctrl-C in the terminal reaches the demo alone and the indexer goes
last, after the pods that talk to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
from collections.abc import AsyncIterator
from typing import BinaryIO

import httpx

from app.child_command import child_command
from app.errors import Unresponsive

START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 10.0


@contextlib.asynccontextmanager
async def running_indexer(port: int) -> AsyncIterator[str]:
    """The URL of an indexer with the embedded defaults. Raises Unresponsive when it does not start."""
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *child_command("app", "serve", "--host", "127.0.0.1", "--port", str(port)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            process_group=0,
        )
        try:
            yield await _started(process, log)
        finally:
            await _end(process)


async def _started(process: asyncio.subprocess.Process, log: BinaryIO) -> str:
    assert process.stdout is not None, "the indexer is started with a pipe"
    try:
        async with asyncio.timeout(START_DEADLINE_S):
            line = (await process.stdout.readline()).decode()
            found = re.search(r"http://\S+", line)
            if found is not None:
                await _until_ready(found.group())
                return found.group()
    except TimeoutError:
        pass
    log.seek(0)
    raise Unresponsive(f"the indexer did not start; it said:\n{log.read()[-2_000:].decode(errors='replace')}")


async def _until_ready(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=1.0) as http:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await http.get("/readyz")).is_success:
                    return
            await asyncio.sleep(0.05)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_DEADLINE_S)
    except TimeoutError:
        process.kill()
        await process.wait()
