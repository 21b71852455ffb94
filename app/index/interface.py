"""What the service asks of an index: the native one serves, the oracle of the tests stands in for it.

Meaning and errors of every call are in the contract at the top of app/index/prefix_index.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from app._native import AnswerBook, PlainBatch
from app.index.prefix_index import (
    TICK_MS,
    ContextInfo,
    Depths,
    Holding,
    IndexStats,
    NameRun,
    RemoveResult,
    SlotInfo,
    StoreResult,
    SweepResult,
)

LISTED_A_SLICE = 4_096  # blocks: 0.3 ms


def ticks(seconds: float) -> int:
    """A length of time in the index's ticks, rounded up."""
    return math.ceil(seconds * 1000 / TICK_MS)


class Index(Protocol):
    def context(self, model: str, lora: str | None, block_size: int, now: int) -> int: ...
    def find_contexts(self, model: str, lora: str | None) -> list[ContextInfo]: ...
    def contexts(self) -> list[ContextInfo]: ...
    def add_owner(self) -> int: ...
    def clear_owner(self, owner: int) -> None: ...
    def owner_claims(self) -> dict[int, int]: ...
    def unclaimed_owners(self) -> list[int]: ...
    def add_source(self) -> int: ...
    def drop_source(self, source: int) -> None: ...
    def store(
        self,
        source: int,
        context: int,
        *,
        tier: int,
        group: int,
        engine_hashes: bytes,
        parent: int | None,
        token_ids: bytes,
        extra_keys: tuple[bytes, ...] | None,
        now: int,
        count_copies: bool = True,
        owner: int = 0,
    ) -> StoreResult: ...
    def place(
        self,
        source: int,
        *,
        tier: int,
        group: int,
        engine_hashes: bytes,
        now: int,
        count_copies: bool = True,
        owner: int = 0,
    ) -> StoreResult: ...
    def store_prefixes(
        self,
        source: int,
        context: int,
        *,
        tier: int,
        group: int,
        engine_hashes: bytes,
        prefix_hashes: bytes,
        copies: bytes | None,
        now: int,
        count_copies: bool = True,
        owner: int = 0,
    ) -> StoreResult: ...
    def store_hashed(
        self,
        source: int,
        context: int,
        *,
        tier: int,
        group: int,
        engine_hashes: bytes,
        chain_from: int | None,
        prefix_hashes: bytes,
        contents: bytes,
        now: int,
        count_copies: bool = True,
        owner: int = 0,
    ) -> StoreResult: ...
    def chain_of(
        self, source: int, context: int, *, tier: int, group: int, parent: int, now: int
    ) -> int | None: ...
    def remove(
        self, source: int, *, tier: int, group: int, engine_hashes: bytes, now: int
    ) -> RemoveResult: ...
    def apply_plain(
        self, batch: PlainBatch, source: int, context: int, *, now: int, count_copies: bool
    ) -> tuple[int, int, int, int]: ...
    def clear(self, source: int, *, tier: int | None = None, context: int | None = None) -> None: ...
    def match_tokens(
        self, context: int, token_ids: bytes, extra_keys: tuple[bytes, ...] | None, now: int
    ) -> list[Depths]: ...
    def match_hashes(self, context: int, prefix_hashes: bytes, now: int) -> list[Depths]: ...
    def match_tokens_packed(
        self, context: int, token_ids: bytes, extra_keys: tuple[bytes, ...] | None, now: int
    ) -> bytes: ...
    def match_hashes_packed(self, context: int, prefix_hashes: bytes, now: int) -> bytes: ...
    def answer(
        self,
        book: AnswerBook,
        context: int,
        asked: bytes,
        *,
        are_hashes: bool,
        extra_keys: tuple[bytes, ...] | None,
        now: int,
        frame: tuple[bytes, bytes],
        unit: int,
        tokens: int,
        now_s: float,
        sources: set[int] | None,
    ) -> tuple[bytes, int, int]: ...
    def context_ids(self, model: str, lora: str | None) -> Mapping[int, int]: ...
    def prefix_hashes(
        self,
        model: str,
        lora: str | None,
        block_size: int,
        token_ids: bytes,
        extra_keys: tuple[bytes, ...] | None,
    ) -> bytes: ...
    def add_speculative(
        self, context: int, source: int, prefix_hashes: bytes, ttl_ticks: int, now: int
    ) -> int: ...
    def list_all(self, visits_max: int, now: int) -> bool: ...
    def holders(self, context: int, prefix_hash: int, now: int) -> list[tuple[int, int, int]]: ...
    def holdings(self, context: int, prefix_hashes: bytes, now: int) -> list[Holding]: ...
    def owners_at(
        self, source: int, context: int, *, tier: int, group: int, prefix_hashes: bytes
    ) -> list[tuple[int, int]]: ...
    def prefix_of(
        self, context: int, source: int, *, tier: int, group: int, engine_hash: int, now: int
    ) -> int | None: ...
    def names(self, cursor: int, names_max: int, now: int) -> tuple[list[NameRun], int | None]: ...
    def blocks_by_tier(self, source: int) -> tuple[int, int, int, int]: ...
    def slots(self) -> list[SlotInfo]: ...
    def orphan_blocks(self, source: int) -> int: ...
    def orphan_drops(self) -> list[tuple[int, int]]: ...
    def sweep(self, now: int, visits_max: int) -> SweepResult: ...
    def stats(self) -> IndexStats: ...


def list_in_slices(index: Index, now: Callable[[], int]) -> Iterator[None]:
    """`list_all` to its end, in slices: ahead of whoever asks for prefixes without their chains."""
    while not index.list_all(LISTED_A_SLICE, now()):
        yield
