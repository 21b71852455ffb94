"""The floor under every HTTP figure: uvicorn with our settings around an ASGI callable that does nothing.

python -m benchmarks.bare_server PORT ANSWER_BYTES
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn


class Bare:
    """Takes the body and sends `size` bytes."""

    def __init__(self, size: int) -> None:
        self._body = b"x" * size

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body", False):
            pass
        headers = [(b"content-length", b"%d" % len(self._body)), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._body})


if __name__ == "__main__":
    uvicorn.run(
        Bare(int(sys.argv[2])),
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        server_header=False,
        log_level="error",
    )
