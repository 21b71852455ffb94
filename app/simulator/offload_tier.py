"""The offload tier of a pod as a whole, and what it tells an indexer.

Tensor parallelism splits every chunk over `world_size` workers, each with a store of its own, so the tier
has a chunk only while all of them have it. An indexer hears `Stored` when a store leaves a chunk and all before
it with every worker, and `Removed` when the first worker loses it: medium `CPU`, one chunk an event, chunks
chained among themselves and not to the engine's blocks, as LMCache's connector publishes them.
"""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Sequence

from app.ingest.vllm import Removed, Stored, WireEvent
from app.simulator.block_names import extra_keys, packed
from app.simulator.offload import OffloadEngine, OffloadSettings, check_settings, chunk_hashes


class OffloadTier:
    """All workers of one pod. `settings.worker_id` is not used: there is one worker for each."""

    def __init__(self, settings: OffloadSettings | None = None) -> None:
        self.settings = settings or OffloadSettings()
        check_settings(self.settings)
        self.workers = tuple(
            OffloadEngine(dataclasses.replace(self.settings, worker_id=worker), on_evicted=self._lost)
            for worker in range(self.settings.world_size)
        )
        self._events: list[WireEvent] = []
        self._told: dict[str, int] = {}  # chunk hash in hex -> name, for chunks that the indexer knows of

    def lookup(self, token_ids: Sequence[int], *, salt: str | None = None, lora: str | None = None) -> int:
        """Leading tokens that every worker has."""
        namespace = _namespace(salt, lora)
        return min(worker.lookup(token_ids, namespace=namespace) for worker in self.workers)

    def load(self, token_ids: Sequence[int], *, salt: str | None = None, lora: str | None = None) -> int:
        """Like `lookup`, but the chunks are read and count as used."""
        namespace = _namespace(salt, lora)
        tokens = self.lookup(token_ids, salt=salt, lora=lora)
        for worker in self.workers:
            worker.retrieve(token_ids[:tokens], namespace=namespace)
        return tokens

    def store(
        self,
        token_ids: Sequence[int],
        *,
        salt: str | None = None,
        lora: str | None = None,
        workers: Sequence[int] | None = None,
    ) -> None:
        """Keep the full chunks of the tokens, on all workers unless only some are named."""
        tokens = packed(token_ids)
        namespace = _namespace(salt, lora)
        whole = len(tokens) // self.settings.chunk_tokens * self.settings.chunk_tokens
        if not whole:
            return
        for number in workers if workers is not None else range(self.settings.world_size):
            self.workers[number].store(tokens[:whole], tokens[:whole], namespace=namespace)
        self._tell_stored(tokens, namespace, salt, lora)

    def drain_events(self) -> list[WireEvent]:
        drained, self._events = self._events, []
        return drained

    def _tell_stored(
        self, tokens: array.array[int], namespace: str, salt: str | None, lora: str | None
    ) -> None:
        size = self.settings.chunk_tokens
        parent: int | None = None
        for index, chunk_hash in enumerate(chunk_hashes(tokens, size, namespace)):
            name = int.from_bytes(chunk_hash[-8:], "big")
            if any(not worker.holds(chunk_hash) for worker in self.workers):
                return
            if chunk_hash.hex() not in self._told:
                self._told[chunk_hash.hex()] = name
                self._events.append(
                    Stored(
                        block_hashes=[name],
                        parent_block_hash=parent,
                        token_ids=tokens[index * size : (index + 1) * size].tolist(),
                        block_size=size,
                        lora_id=1 if lora is not None else None,
                        lora_name=lora,
                        medium="CPU",
                        extra_keys=[extra_keys(salt, lora, is_root=index == 0)],
                    )
                )
            parent = name

    def _lost(self, key: str) -> None:
        name = self._told.pop(key.rpartition("@")[2], None)
        if name is not None:
            self._events.append(Removed(block_hashes=[name], medium="CPU"))


def _namespace(salt: str | None, lora: str | None) -> str:
    return "" if salt is None and lora is None else repr((salt, lora))
