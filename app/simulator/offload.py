"""The offload tier of a pod: chunks of KV cache kept in host memory, after LMCache's engine.

Tokens are cut into chunks (256 by default); a chunk's hash is SHA-256 over the hash before it and its tokens,
and its key is `format@model@world_size@worker@hash`.

    ChunkStore      bounded, the least recently used chunk goes first
    OffloadEngine   one worker: store with a suffix mask, retrieve, lookup, hit rate
    OffloadEngines  one engine an id; a second one with another configuration is refused

The workers of a pod together are app/simulator/offload_tier.py. A run of chunks is used tail first, so a
chain loses its leaf first. What stands for keys and values is opaque here: one item a token.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from app.errors import InvalidInput, InvalidSettings
from app.simulator.block_names import packed


@dataclasses.dataclass(frozen=True, slots=True)
class OffloadSettings:
    """Of one worker. `world_size` workers hold one pod's cache together."""

    model: str = "model"
    world_size: int = 1
    worker_id: int = 0
    chunk_tokens: int = 256
    capacity_chunks: int = 10_000
    format: str = "vllm"


@dataclasses.dataclass(frozen=True, slots=True)
class OffloadStats:
    chunks: int
    stored_chunks: int  # since start, as all that follow
    evicted_chunks: int
    hit_tokens: int
    missed_tokens: int

    @property
    def hit_rate(self) -> float:
        asked = self.hit_tokens + self.missed_tokens
        return self.hit_tokens / asked if asked else 0.0


class ChunkStore:
    """Least recently used first out; `on_evicted` hears each key that goes."""

    def __init__(self, capacity_chunks: int, on_evicted: Callable[[str], None] | None = None) -> None:
        if capacity_chunks < 1:
            raise InvalidSettings(f"capacity_chunks is at least 1, not {capacity_chunks}")
        self.capacity_chunks = capacity_chunks
        self.evicted = 0
        self._on_evicted = on_evicted
        self._chunks: collections.OrderedDict[str, tuple[Any, ...]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, key: str) -> bool:
        return key in self._chunks

    def put(self, key: str, kv: tuple[Any, ...]) -> None:
        self._chunks[key] = kv
        self._chunks.move_to_end(key)
        while len(self._chunks) > self.capacity_chunks:
            oldest, _ = self._chunks.popitem(last=False)
            self.evicted += 1
            if self._on_evicted is not None:
                self._on_evicted(oldest)

    def peek(self, key: str) -> tuple[Any, ...] | None:
        return self._chunks.get(key)

    def touch(self, key: str) -> None:
        self._chunks.move_to_end(key)

    def clear(self) -> None:
        self._chunks.clear()


class OffloadEngine:
    """One worker's part of the tier."""

    def __init__(
        self, settings: OffloadSettings | None = None, *, on_evicted: Callable[[str], None] | None = None
    ) -> None:
        self.settings = settings or OffloadSettings()
        check_settings(self.settings)
        self._store = ChunkStore(self.settings.capacity_chunks, on_evicted)
        self._stored = 0
        self._hit_tokens = 0
        self._missed_tokens = 0
        self._closed = False

    def key(self, chunk_hash: bytes) -> str:
        its = self.settings
        return f"{its.format}@{its.model}@{its.world_size}@{its.worker_id}@{chunk_hash.hex()}"

    def store(
        self,
        token_ids: Sequence[int],
        kv: Sequence[Any],
        mask: Sequence[bool] | None = None,
        *,
        skip_existing: bool = True,
        namespace: str = "",
    ) -> int:
        """Keep every full chunk of the tokens that `mask` marks (a suffix, from a chunk's border on).

        `kv` has one item for each marked token. Returns the number of chunks written.
        """
        self._check_open()
        first = self._marked_from(token_ids, mask)
        if len(kv) != len(token_ids) - first:
            raise InvalidInput(f"{len(kv)} items of kv for {len(token_ids) - first} tokens", field="kv")
        size = self.settings.chunk_tokens
        written = 0
        for index, chunk_hash in reversed(list(enumerate(self._hashes(token_ids, namespace)))):
            start = index * size
            key = self.key(chunk_hash)
            if start < first or (skip_existing and key in self._store):
                continue
            self._store.put(key, tuple(kv[start - first : start - first + size]))
            written += 1
        self._stored += written
        return written

    def retrieve(
        self, token_ids: Sequence[int], mask: Sequence[bool] | None = None, *, namespace: str = ""
    ) -> tuple[list[Any], list[bool]]:
        """Items of the longest cached run from the first marked token on, and which tokens they are of."""
        self._check_open()
        first = self._marked_from(token_ids, mask)
        size = self.settings.chunk_tokens
        found: list[Any] = []
        keys: list[str] = []
        for index, chunk_hash in enumerate(self._hashes(token_ids, namespace)):
            if index * size < first:
                continue
            kv = self._store.peek(self.key(chunk_hash))
            if kv is None:
                break
            found.extend(kv)
            keys.append(self.key(chunk_hash))
        for key in reversed(keys):
            self._store.touch(key)
        self._hit_tokens += len(found)
        self._missed_tokens += len(token_ids) - first - len(found)
        return found, [first <= position < first + len(found) for position in range(len(token_ids))]

    def lookup(self, token_ids: Sequence[int], *, namespace: str = "") -> int:
        """Leading tokens that are cached; counts as no use."""
        self._check_open()
        found = 0
        for chunk_hash in self._hashes(token_ids, namespace):
            if self.key(chunk_hash) not in self._store:
                break
            found += self.settings.chunk_tokens
        return found

    def holds(self, chunk_hash: bytes) -> bool:
        return self.key(chunk_hash) in self._store

    def stats(self) -> OffloadStats:
        return OffloadStats(
            len(self._store), self._stored, self._store.evicted, self._hit_tokens, self._missed_tokens
        )

    def close(self) -> None:
        """Every later call is refused; closing again is harmless."""
        self._closed = True
        self._store.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInput("this offload engine is closed")

    def _marked_from(self, token_ids: Sequence[int], mask: Sequence[bool] | None) -> int:
        """How many tokens the mask leaves out at the front."""
        if mask is None:
            return 0
        if len(mask) != len(token_ids):
            raise InvalidInput(f"a mask of {len(mask)} for {len(token_ids)} tokens", field="mask")
        first = next((position for position, marked in enumerate(mask) if marked), len(mask))
        if not all(mask[first:]):
            raise InvalidInput("a mask leaves out tokens at the front only", field="mask")
        if first % self.settings.chunk_tokens and first != len(mask):
            raise InvalidInput(
                f"a mask begins at a chunk's border: {first} is no multiple of {self.settings.chunk_tokens}",
                field="mask",
            )
        return first

    def _hashes(self, token_ids: Sequence[int], namespace: str) -> Iterator[bytes]:
        return chunk_hashes(packed(token_ids), self.settings.chunk_tokens, namespace)


def chunk_hashes(token_ids: array.array[int], chunk_tokens: int, namespace: str = "") -> Iterator[bytes]:
    """SHA-256 of the hash before and the chunk's tokens (uint32, little-endian), for every full chunk."""
    before = namespace.encode()
    for start in range(0, len(token_ids) - chunk_tokens + 1, chunk_tokens):
        before = hashlib.sha256(before + token_ids[start : start + chunk_tokens].tobytes()).digest()
        yield before


class OffloadEngines:
    """Engines by id."""

    def __init__(self) -> None:
        self._engines: dict[str, OffloadEngine] = {}

    def open(self, engine_id: str, settings: OffloadSettings) -> OffloadEngine:
        """The engine of that id, made when new; InvalidSettings when it exists with other settings."""
        known = self._engines.get(engine_id)
        if known is None:
            known = self._engines[engine_id] = OffloadEngine(settings)
        elif known.settings != settings:
            raise InvalidSettings(
                f"offload engine {engine_id!r} exists with other settings: {known.settings}"
            )
        return known

    def close(self, engine_id: str) -> bool:
        engine = self._engines.pop(engine_id, None)
        if engine is not None:
            engine.close()
        return engine is not None


def check_settings(settings: OffloadSettings) -> None:
    if settings.chunk_tokens < 1 or settings.world_size < 1:
        raise InvalidSettings("chunk_tokens and world_size are at least 1")
    if not 0 <= settings.worker_id < settings.world_size:
        raise InvalidSettings(f"worker_id {settings.worker_id} is not below world_size {settings.world_size}")
