"""Changes through the log: the Writer of HTTP handlers, and what a feed of followed streams calls.

A call of a handler returns when its entry is in the log and applied here, so the sender's next match sees it. What can
be refused is refused before it enters the log, judged by the present picture; it is judged again, by the picture of that
moment, when it is applied.

While the log is away a call waits `answer_timeout_s` and then says LogAway: nothing was changed when it had not been
sent yet; else nobody can know before Redis is back, and a batch with a `seq` may safely be sent again.

A feed's calls return at once: its order is kept, `is_full` tells it to wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from app.errors import LogAway
from app.events import BlockRemoved, Envelope, EventBatch, Tier
from app.pods import Pod, PodSpec, SourceState
from app.replication.applier import Applier
from app.replication.coder import Coder, Ticket
from app.replication.entries import (
    AnyEntry,
    BlocksForgotten,
    Followed,
    LeaseTaken,
    OwnerCleared,
    PodDropped,
    PodRegistered,
    Posted,
    RemovedEverywhere,
    SourceReported,
    SourceReset,
    SourceSilent,
    encode_entry,
    partition_of,
)
from app.replication.outbox import Outbox, Sending
from app.service import IndexerService
from app.service.batches import BatchResult
from app.service.owners import OwnerInfo


class LogWriter:
    """All calls on the service's thread."""

    immediate: IndexerService | None = None

    def __init__(
        self,
        service: IndexerService,
        coder: Coder,
        outbox: Outbox,
        applier: Applier,
        *,
        partitions: int,
        answer_timeout_s: float,
    ) -> None:
        self._service = service
        self._coder = coder
        self._outbox = outbox
        self._applier = applier
        self._partitions = partitions
        self._answer_timeout_s = answer_timeout_s

    # -- Writer

    async def post(self, envelope: Envelope, batch: EventBatch) -> BatchResult:
        self._service.owners.check(envelope.owner)
        if not self._coder.is_under_way(envelope.pod, envelope.dp_rank):
            self._service.check(envelope, batch)
        elif not self._coder.is_changing(envelope.pod):
            self._service.check_sender(envelope)
        coded, ticket = self._coder.code(envelope, batch)
        entry = Posted(batch=coded, **msgspec.structs.asdict(envelope))
        result = await self._answer(self._put(envelope.pod, entry, ticket))
        assert isinstance(result, BatchResult)
        return result

    async def register(self, spec: PodSpec) -> Pod:
        self._service.check_spec(spec)
        ticket = self._coder.note_control(spec.name)
        pod = await self._answer(self._put(spec.name, PodRegistered(spec=spec), ticket))
        assert isinstance(pod, Pod)
        return pod

    async def drop_pod(self, name: str) -> None:
        if not self._coder.is_changing(name):
            self._service.pod(name)
        await self._answer(self._put(name, PodDropped(pod=name), self._coder.note_control(name)))

    async def remove_blocks(
        self, pod: str, *, model: str | None, lora: str | None, dp_rank: int | None, tier: Tier | None
    ) -> int:
        if not self._coder.is_changing(pod):
            self._service.pod(pod)
        entry = BlocksForgotten(pod=pod, model=model, lora=lora, dp_rank=dp_rank, tier=tier)
        removed = await self._answer(self._put(pod, entry, self._coder.note_control(pod)))
        assert isinstance(removed, int)
        return removed

    async def remove_everywhere(self, model: str, lora: str | None, events: tuple[BlockRemoved, ...]) -> int:
        entry = RemovedEverywhere(model=model, lora=lora, events=events)
        sent = [
            self._put_in(partition, entry, self._coder.note_everywhere(), answered=True)
            for partition in range(self._partitions)
        ]
        removed = 0
        for sending in sent:
            copies = await self._answer(sending)
            assert isinstance(copies, int)
            removed += copies
        return removed

    async def clear_owner(self, name: str) -> list[OwnerInfo]:
        self._service.owners.named(name)
        cleared = await self._answer(self._put(name, OwnerCleared(owner=name), Ticket(name)))
        assert isinstance(cleared, list)
        return cleared

    # -- the lease of a pod's streams

    async def take_lease(self, pod: str, epoch: int) -> None:
        """Returns when all that older holders appended has been applied here, and nothing more of them will be.

        Raises Fenced when a newer lease is in the log already.
        """
        await self._answer(self._put(pod, LeaseTaken(pod=pod, epoch=epoch), Ticket(pod)))

    def feed(self, epoch_of: Callable[[str], int | None]) -> FeedWriter:
        """For the streams that this replica follows; `epoch_of` is its lease of a pod, None where it has none."""
        return FeedWriter(self._service, self._coder, self._outbox, self._put, epoch_of)

    def ask_for_silence(self, pod: str, dp_rank: int) -> None:
        """For IndexerService.ask_before_silence. Every replica asks, and the first one is heard."""
        heard = self._applier.heard(pod, dp_rank)
        entry = SourceSilent(pod=pod, dp_rank=dp_rank, heard=heard)
        self._put(pod, entry, self._coder.note_reset(pod, dp_rank), answered=False)

    # -- inside

    def _put(self, pod: str, entry: AnyEntry, ticket: Ticket, *, answered: bool = True) -> Sending:
        return self._put_in(partition_of(pod, self._partitions), entry, ticket, answered=answered)

    def _put_in(self, partition: int, entry: AnyEntry, ticket: Ticket, *, answered: bool) -> Sending:
        answer = asyncio.get_running_loop().create_future() if answered else None
        try:
            return self._outbox.put(partition, encode_entry(entry), ticket, answer)
        except BaseException:
            self._coder.land(ticket)
            raise

    async def _answer(self, sending: Sending) -> Any:
        assert sending.answer is not None
        try:
            return await asyncio.wait_for(sending.answer, self._answer_timeout_s)
        except TimeoutError:
            trouble = self._outbox.trouble or "Redis is slow"
            if self._outbox.withdraw(sending):
                raise LogAway(f"nothing was changed: the log is away ({trouble})") from None
            raise LogAway(
                f"nobody can tell yet whether it was changed: the log does not answer ({trouble})"
            ) from None


class FeedWriter:
    """What app/ingest/feed.py calls, in the order of each stream; nothing waits for an answer.

    What comes without a lease is left out: whoever has it, this replica again maybe, replays it.
    """

    def __init__(
        self,
        service: IndexerService,
        coder: Coder,
        outbox: Outbox,
        put: Callable[..., Sending],
        epoch_of: Callable[[str], int | None],
    ) -> None:
        self._service = service
        self._coder = coder
        self._outbox = outbox
        self._put = put
        self._epoch_of = epoch_of
        self.unleased = 0  # calls left out because the lease was gone

    def _epoch(self, pod: str) -> int | None:
        epoch = self._epoch_of(pod)
        self.unleased += epoch is None
        return epoch

    @property
    def is_full(self) -> bool:
        return self._outbox.is_full

    def position(self, pod: str, dp_rank: int) -> tuple[int, int] | None:
        return self._service.position(pod, dp_rank)

    def apply(
        self, pod: str, dp_rank: int, batch: EventBatch, *, seq: int | None, digest: int | None = None
    ) -> None:
        self._service.pod(pod)
        epoch = self._epoch(pod)
        if epoch is None:
            return
        coded, ticket = self._coder.code(Envelope(pod=pod, dp_rank=dp_rank), batch)
        entry = Followed(pod=pod, dp_rank=dp_rank, seq=seq, digest=digest, epoch=epoch, batch=coded)
        self._put(pod, entry, ticket, answered=False)

    def reset_source(self, pod: str, dp_rank: int, *, restarted: bool) -> None:
        self._service.pod(pod)
        epoch = self._epoch(pod)
        if epoch is None:
            return
        entry = SourceReset(pod=pod, dp_rank=dp_rank, restarted=restarted, epoch=epoch)
        self._put(pod, entry, self._coder.note_reset(pod, dp_rank), answered=False)

    def set_source_state(
        self, pod: str, dp_rank: int, state: SourceState, *, gaps: int = 0, replays: int = 0, cause: str = ""
    ) -> None:
        epoch = self._epoch(pod)
        if epoch is None:
            return
        entry = SourceReported(
            pod=pod,
            dp_rank=dp_rank,
            state=state,
            gaps=gaps,
            replays=replays,
            cause=cause,
            epoch=epoch,
        )
        self._put(pod, entry, Ticket(pod), answered=False)
