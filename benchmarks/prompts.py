"""Prompts of 4,096 tokens, 256 blocks of 16, made from their number; and who holds each."""

from __future__ import annotations

import array
import dataclasses
import random

BLOCK_SIZE = 16
BLOCKS = 256
TOKENS = BLOCK_SIZE * BLOCKS
VOCABULARY = 150_000


@dataclasses.dataclass(frozen=True, slots=True)
class Fleet:
    """`chains` prompts; the first `wide` of them are held by every pod, the others by `holders` of `pods`."""

    chains: int
    pods: int
    holders: int
    wide: int

    def pods_of(self, chain: int) -> list[int]:
        if chain < self.wide:
            return list(range(self.pods))
        return [(chain + step) % self.pods for step in range(self.holders)]

    @property
    def narrow_chains(self) -> range:
        return range(self.wide, self.chains)


def token_ids(chain: int) -> list[int]:
    draw = random.Random(chain)
    return [int(draw.random() * VOCABULARY) for _ in range(TOKENS)]


def packed(tokens: list[int]) -> bytes:
    return array.array("I", tokens).tobytes()


def engine_hashes(chain: int) -> list[int]:
    draw = random.Random(f"engine/{chain}")
    return [draw.getrandbits(63) for _ in range(BLOCKS)]
