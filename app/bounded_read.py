"""What pods and other servers answer us is read whole or not at all: it has a bound, like what is sent to us."""

from __future__ import annotations

import httpx


async def read_at_most(response: httpx.Response, bytes_max: int) -> bytes | None:
    """The body; None where it is longer, which is known before more than a chunk beyond the bound is held."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > bytes_max:
            return None
    return bytes(body)
