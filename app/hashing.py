"""Prefix hashes of a prompt: pure, and the same wherever they are computed.

The index, the command line and the client hash here, so what one of them says the others understand. A router
in another language needs XXH64 (seeded, 64 bits) and msgpack, and nothing else:

    seed(context) = XXH64(msgpack([model, lora or nil, block_size]), seed 0)       lora "" is none
    h[0]          = XXH64(block 0, seed(context))
    h[i]          = XXH64(block i, h[i-1])
    block i       = its token ids as little-endian uint32, then its canonical extra keys (app/extra_keys.py)

Only full blocks have a hash. docs/api.md has test vectors. Cost: about 30 ns a block of 16 tokens.
"""

from __future__ import annotations

import msgspec

from app.errors import InvalidInput, NativeCoreMissing

try:
    from app import _native
except ImportError as error:
    raise NativeCoreMissing from error


def context_seed(model: str, lora: str | None, block_size: int) -> int:
    """What the first block of a context is hashed with."""
    return _native.xxh64(msgspec.msgpack.encode([model, lora or None, block_size]), 0)


def digest(data: bytes, seed: int = 0) -> int:
    """XXH64, the same in every process: tells a batch from another under the same number, damage from none."""
    return _native.xxh64(data, seed)


def prefix_hashes(
    model: str,
    lora: str | None,
    block_size: int,
    token_ids: bytes,
    extra_keys: tuple[bytes, ...] | None = None,
) -> bytes:
    """uint64, one a full block, of `token_ids` (uint32; both little-endian).

    `extra_keys` are canonical encodings, one a block (missing ones are none): app.extra_keys.query_extra_keys
    makes them. Raises InvalidInput for a buffer that is not whole and a block size below 1.
    """
    if block_size < 1:
        raise InvalidInput(f"block_size must be at least 1 token, not {block_size}", field="block_size")
    if len(token_ids) % 4:
        raise InvalidInput("token ids must be 4 bytes each", field="token_ids")
    return _native.prefix_hashes(context_seed(model, lora, block_size), block_size, token_ids, extra_keys)
