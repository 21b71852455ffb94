"""How a change reaches the service: at once, or through the log that replicas share.

Handlers make every change through a Writer. In a lone process that is DirectWriter, which calls the service; with
Redis it is app/replication/log_writer.py, whose calls return when the change is in the log and applied here. Both
raise what the service raises.
"""

from __future__ import annotations

from typing import Protocol

from app.events import BlockRemoved, Envelope, EventBatch, Tier
from app.pods import Pod, PodSpec
from app.service import IndexerService
from app.service.batches import BatchResult
from app.service.owners import OwnerInfo


class Writer(Protocol):
    """The calls of IndexerService of the same names. May raise Overloaded and LogAway besides."""

    @property
    def immediate(self) -> IndexerService | None:
        """The service, where a change may be made by calling it; else None."""

    async def post(self, envelope: Envelope, batch: EventBatch) -> BatchResult: ...
    async def register(self, spec: PodSpec) -> Pod: ...
    async def drop_pod(self, name: str) -> None: ...
    async def remove_blocks(
        self, pod: str, *, model: str | None, lora: str | None, dp_rank: int | None, tier: Tier | None
    ) -> int: ...
    async def remove_everywhere(
        self, model: str, lora: str | None, events: tuple[BlockRemoved, ...]
    ) -> int: ...
    async def clear_owner(self, name: str) -> list[OwnerInfo]: ...


class DirectWriter:
    """A lone process: every call is made at once."""

    def __init__(self, service: IndexerService) -> None:
        self.immediate = service

    async def post(self, envelope: Envelope, batch: EventBatch) -> BatchResult:
        return self.immediate.post(envelope, batch)

    async def register(self, spec: PodSpec) -> Pod:
        return self.immediate.register(spec)

    async def drop_pod(self, name: str) -> None:
        self.immediate.drop_pod(name)

    async def remove_blocks(
        self, pod: str, *, model: str | None, lora: str | None, dp_rank: int | None, tier: Tier | None
    ) -> int:
        return self.immediate.remove_blocks(pod, model=model, lora=lora, dp_rank=dp_rank, tier=tier)

    async def remove_everywhere(self, model: str, lora: str | None, events: tuple[BlockRemoved, ...]) -> int:
        return sum(self.immediate.remove_everywhere(model, lora, event) for event in events)

    async def clear_owner(self, name: str) -> list[OwnerInfo]:
        return self.immediate.owners.clear(name)
