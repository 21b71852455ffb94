"""What this replica has accepted and the log has not given back yet, in order, one queue a partition.

Entries wait here while Redis is away, up to `bytes_max`; past it Overloaded. One group a partition is on its way at a
time, with whatever came meanwhile: no entry waits for company, and under load groups grow by themselves. An append
whose answer did not come is sent again unchanged, because the log may have it or not; whoever reads it knows a
group by its number.

An entry leaves the outbox when it has been read from the log and applied here, which is when its sender is answered
and its bytes count no more.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from app.errors import LogAway, Overloaded
from app.replication.coder import Ticket
from app.replication.entries import encode_group

GROUP_BYTES_MAX = 64 * 1024  # of one append, unless one entry is larger: what is applied at one go
RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # between one try and the next


@dataclasses.dataclass(slots=True, eq=False)
class Sending:
    """One entry under way. `answer` is None where nobody waits for one."""

    partition: int
    entry: bytes
    ticket: Ticket
    answer: asyncio.Future[Any] | None


@dataclasses.dataclass(slots=True)
class _Queue:
    waiting: deque[Sending] = dataclasses.field(default_factory=deque)
    sent: dict[int, tuple[list[Sending], bytes]] = dataclasses.field(default_factory=dict)  # by number
    again: deque[int] = dataclasses.field(default_factory=deque)  # numbers of groups to be sent once more
    number: int = 0
    arrived: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    trouble: str = ""  # why the last append failed; "" when it did not


class Outbox:
    """All calls on the service's thread. `landed` is told of every entry that is no longer under way."""

    def __init__(
        self,
        replica: str,
        partitions: int,
        *,
        bytes_max: int,
        append: Callable[[int, bytes], Awaitable[object]],
        landed: Callable[[Ticket], None],
    ) -> None:
        self._replica = replica
        self._queues = [_Queue() for _ in range(partitions)]
        self._bytes_max = bytes_max
        self._append = append
        self._landed = landed
        self._was_full = False
        self._empty = asyncio.Event()
        self._empty.set()
        self.bytes = 0
        self.entries = 0
        self.room_listeners: list[
            Callable[[], None]
        ] = []  # told when there is room again after there was none
        self.counts = {"appended_groups": 0, "appended_entries": 0, "append_failures": 0, "outbox_refused": 0}

    @property
    def is_full(self) -> bool:
        """When it is, `room_listeners` will be told as soon as half of it is free."""
        if self.bytes >= self._bytes_max:
            self._was_full = True
        return self._was_full

    @property
    def trouble(self) -> str:
        return next((queue.trouble for queue in self._queues if queue.trouble), "")

    def put(
        self, partition: int, entry: bytes, ticket: Ticket, answer: asyncio.Future[Any] | None
    ) -> Sending:
        """Raises Overloaded, with nothing changed, where an answer is waited for and there is no room.

        What cannot be refused (the fate of a stream) goes in all the same; its source watches `is_full`.
        """
        if answer is not None and self.bytes + len(entry) > self._bytes_max:
            self.counts["outbox_refused"] += 1
            raise Overloaded(f"redis_outbox_bytes_max = {self._bytes_max} bytes wait for the log already")
        sending = Sending(partition, entry, ticket, answer)
        queue = self._queues[partition]
        queue.waiting.append(sending)
        queue.arrived.set()
        self.bytes += len(entry)
        self.entries += 1
        self._empty.clear()
        return sending

    def withdraw(self, sending: Sending) -> bool:
        """True when it had not been sent: then it never will be."""
        queue = self._queues[sending.partition]
        if sending not in queue.waiting:
            return False
        queue.waiting.remove(sending)
        self._leave(sending)
        return True

    def settle(self, partition: int, number: int, outcomes: Sequence[object]) -> None:
        """A group of ours has been applied; an outcome that is an exception is raised to its sender."""
        sent, _ = self._queues[partition].sent.pop(number, ([], b""))
        for sending, outcome in zip(sent, outcomes, strict=False):
            self._leave(sending)
            if sending.answer is None or sending.answer.done():
                continue
            if isinstance(outcome, Exception):
                sending.answer.set_exception(outcome)
            else:
                sending.answer.set_result(outcome)

    def send_again(self, partition: int, known: int = 0) -> None:
        """What was sent may be lost. Up to the group `known`, ours are in the picture that we have now, and nobody can
        tell any more what came of each; what is behind is sent once more, in order, before anything new."""
        queue = self._queues[partition]
        unknown = LogAway("it was changed, and what came of it cannot be told: the log was lost meanwhile")
        for number in [number for number in queue.sent if number <= known]:
            self.settle(partition, number, [unknown] * len(queue.sent[number][0]))
        queue.again = deque(sorted(queue.sent))
        queue.arrived.set()

    def _leave(self, sending: Sending) -> None:
        self.bytes -= len(sending.entry)
        self.entries -= 1
        self._landed(sending.ticket)
        if not self.entries:
            self._empty.set()
        if self._was_full and self.bytes <= self._bytes_max // 2:
            self._was_full = False
            for listener in self.room_listeners:
                listener()

    async def run(self, partition: int) -> None:
        """Appends what is put, until it is cancelled."""
        queue = self._queues[partition]
        while True:
            while not queue.waiting and not queue.again:
                queue.arrived.clear()
                await queue.arrived.wait()
            if queue.again:
                number = queue.again.popleft()
                if number in queue.sent:
                    await self._send(partition, queue, number, queue.sent[number][1])
                continue
            group = _take_group(queue)
            queue.number += 1
            data = encode_group(self._replica, queue.number, [sending.entry for sending in group])
            queue.sent[queue.number] = group, data
            await self._send(partition, queue, queue.number, data)
            self.counts["appended_groups"] += 1
            self.counts["appended_entries"] += len(group)

    async def _send(self, partition: int, queue: _Queue, number: int, data: bytes) -> None:
        failures = 0
        # Not in `sent`: it was read from the log, an answer was lost, and no more. In `again`: its turn will come.
        while number in queue.sent and number not in queue.again:
            try:
                await self._append(partition, data)
            except LogAway as error:
                self.counts["append_failures"] += 1
                queue.trouble = str(error)
                await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
                failures += 1
            else:
                break
        queue.trouble = ""

    async def drained(self) -> None:
        """Waits until the log has given back all that was put; whoever calls bounds the wait."""
        await self._empty.wait()


def _take_group(queue: _Queue) -> list[Sending]:
    group = [queue.waiting.popleft()]
    size = len(group[0].entry)
    while queue.waiting and size + len(queue.waiting[0].entry) <= GROUP_BYTES_MAX:
        group.append(queue.waiting.popleft())
        size += len(group[-1].entry)
    return group
