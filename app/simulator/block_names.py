"""Names of blocks: digests of a block and everything before it, as an engine makes them for itself.

An engine's hash is opaque to everybody else, so the function is free; what matters is kept: equal prefixes
get equal names within one cache, a salt changes every name behind the root, an adapter changes every name,
and two caches with different seeds agree on nothing.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Iterator, Sequence

from app.errors import InvalidInput
from app.simulator.pages import Name


class BlockNamer:
    """Of one cache."""

    def __init__(self, block_size: int, seed: bytes) -> None:
        self.block_size = block_size
        self._root = hashlib.blake2b(seed, digest_size=32).digest()

    def name(
        self, parent: Name | None, token_ids: array.array[int], salt: str | None, lora: str | None
    ) -> Name:
        digest = hashlib.blake2b(parent or self._root, digest_size=32)
        digest.update(token_ids.tobytes())
        digest.update(repr(extra_keys(salt, lora, is_root=parent is None)).encode())
        return digest.digest()

    def names(
        self, token_ids: array.array[int], blocks: int, salt: str | None, lora: str | None
    ) -> Iterator[Name]:
        """Of the first `blocks` blocks, made one by one as they are asked for."""
        parent: Name | None = None
        for start in range(0, blocks * self.block_size, self.block_size):
            parent = self.name(parent, token_ids[start : start + self.block_size], salt, lora)
            yield parent


def extra_keys(salt: str | None, lora: str | None, *, is_root: bool) -> list[str] | None:
    """What goes into a block besides its tokens: the adapter everywhere, the salt at the root only."""
    keys = [key for key in (lora, salt if is_root else None) if key is not None]
    return keys or None


def packed(token_ids: Sequence[int]) -> array.array[int]:
    try:
        return array.array("I", token_ids)
    except (TypeError, OverflowError) as error:
        raise InvalidInput(
            f"token ids are integers from 0 to 2**32 - 1: {error}", field="token_ids"
        ) from error
