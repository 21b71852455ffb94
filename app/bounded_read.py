"""What pods and other servers answer us is read whole or not at all: it has a bound, like what is sent to us."""

from __future__ import annotations

import httpx


async def get_at_most(client: httpx.AsyncClient, url: str, bytes_max: int) -> bytes | None:
    """The body of an answer of `url`; None as below. Raises httpx.HTTPError, also for an answer that is an error."""
    async with client.stream("GET", url) as response:
        response.raise_for_status()
        return await read_at_most(response, bytes_max)


async def read_at_most(response: httpx.Response, bytes_max: int) -> bytes | None:
    """The body; None where it is longer, which is known before more than a chunk beyond the bound is held."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > bytes_max:
            return None
    return bytes(body)
