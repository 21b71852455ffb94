"""Reads the log and hands it to the applier, one task a partition.

While Redis is away the picture is served as it is, and its pods' rows are degraded and say why; afterwards reading goes
on from the position. Before that, and at the start, it is checked that reading can go on from there (generations.py).
Until it can, nothing more is applied, the partition is in `trouble`, the replica is not ready, and it checks again from
time to time. Each read also asks whether the group that was applied last is still there: if not, Redis lost it, or it
was trimmed. A partition of which nothing has been read yet asks whether its beginning was trimmed, unless it found the
end lately: entries younger than `keep_s` are not trimmed.

Groups are applied in slices of SLICE_S, so that queries wait for a slice at most, and for one group at least.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Protocol

from app.errors import LogAway
from app.replication.applier import Applier
from app.replication.entries import UnknownEntry
from app.replication.generations import LogBroken
from app.replication.redis_log import BEGINNING, GROUPS_PER_READ, LogSilent, RedisLog, order

logger = logging.getLogger(__name__)

SLICE_S = 0.002
RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # between one try and the next
# In a row, from which on the partition is away: a connection that only broke is made anew before. With a silent Redis it
# is away at once: that has taken its time already, and the next try may have to wait for those of other partitions.
FAILURES_TOLD = 2


@dataclasses.dataclass(slots=True)
class PartitionState:
    """How the reading of one partition goes."""

    entered: bool = False  # it has been read to its end since the start
    caught_up_s: float = 0.0  # monotonic: when the last look began that found the end
    caught_up: bool = False  # all that was there at the last look has been applied
    trouble: str = "the log has not been read yet"  # "" while it is being read
    away_since_s: float | None = None  # Unix time; None: rows do not say so


class Ended(Protocol):
    """Outbox.has_ended."""

    def __call__(self, partition: int, began_s: float) -> None: ...


class Places(Protocol):
    """The part of Generations that is needed."""

    async def ensure(self, partition: int) -> None: ...
    async def is_whole(self, partition: int) -> bool: ...


class _Interrupted(Exception):
    """What was read is not to be applied."""


class Follower:
    """All calls on the service's thread; `wall` gives Unix time."""

    def __init__(
        self,
        log: RedisLog,
        applier: Applier,
        places: Places,
        *,
        partitions: int,
        keep_s: float,
        ended: Ended,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._log = log
        self._applier = applier
        self._places = places
        self._ended = ended
        self._keep_s = keep_s
        self._interruptions = 0
        self._wall = wall
        self.partitions = [PartitionState() for _ in range(partitions)]
        self._caught_up = asyncio.Event()
        self.counts = {"read_groups": 0, "read_bytes": 0, "reconnects": 0, "read_failures": 0}

    def lag_s(self, partition: int) -> float:
        """By how much the newest group applied here is older than now, while there are newer ones to be read; else 0."""
        state = self.partitions[partition]
        if state.caught_up or state.trouble:
            return 0.0
        milliseconds, _ = order(self._applier.state.positions[partition])
        return max(0.0, self._wall() - milliseconds / 1000) if milliseconds else 0.0

    async def caught_up_once(self) -> None:
        """Returns when every partition has been read to its end since the start."""
        await self._caught_up.wait()

    @property
    def away_s(self) -> float:
        """For how long a partition has not been read, the longest."""
        since = [state.away_since_s for state in self.partitions if state.away_since_s is not None]
        return max(0.0, self._wall() - min(since)) if since else 0.0

    @property
    def is_caught_up(self) -> bool:
        """Every partition has been read, and none is in trouble."""
        return all(state.entered and not state.trouble for state in self.partitions)

    @property
    def trouble(self) -> str:
        return next((state.trouble for state in self.partitions if state.trouble), "")

    async def run(self, partition: int) -> None:
        """Until it is cancelled."""
        state = self.partitions[partition]
        failures = 0
        while True:
            try:
                interruptions = self._interruptions
                await self._places.ensure(partition)
                await self._log.warn_of_evictions()
                if self._interruptions != interruptions:
                    continue
                if failures:
                    self.counts["reconnects"] += 1
                    logger.info("partition %d of the log is read again", partition)
                failures = 0
                state.trouble = ""
                while True:
                    await self._read(partition, state, interruptions)
            except _Interrupted:
                continue
            except (LogAway, UnknownEntry) as error:
                self.counts["read_failures"] += 1
                if str(error) != state.trouble:
                    logger.warning("partition %d of the log is not read: %s", partition, error)
                state.trouble = str(error)
                state.caught_up = False
                is_silent = isinstance(error, LogSilent) and not failures
                if is_silent or failures + 1 == FAILURES_TOLD:
                    state.away_since_s = state.away_since_s or self._wall()
                    self._applier.set_away(partition, f"the log is away: {error}")
                await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
                failures += 1

    def interrupt(self, cause: str, *, replaced: bool) -> None:
        """The log is in doubt, or another one: what was read is not applied, rows say so, and every partition makes
        sure of its place anew. `replaced`: what is held as well, so it has to be read to its end once more."""
        self._interruptions += 1
        for partition, state in enumerate(self.partitions):
            state.entered = state.entered and not replaced
            state.caught_up = False
            state.trouble = cause
            state.away_since_s = state.away_since_s or self._wall()
            self._applier.set_away(partition, f"the log is away: {cause}")

    async def _read(self, partition: int, state: PartitionState, interruptions: int) -> None:
        position = self._applier.state.positions[partition]
        began_s = time.monotonic()
        groups, is_whole = await self._log.read(partition, position, wait=state.caught_up)
        if position == BEGINNING:
            # What is young is not trimmed: only who had not read to the end lately can have been passed by it.
            is_sure = state.caught_up and began_s - state.caught_up_s < self._keep_s / 2
            is_whole = not groups or is_sure or await self._places.is_whole(partition)
        if self._interruptions != interruptions:
            raise _Interrupted
        if not is_whole:
            raise LogBroken(f"the log was trimmed past {position}, or lost it")
        state.caught_up = False
        slice_ends_s = time.perf_counter() + SLICE_S
        for position, data in groups:
            self._applier.apply(partition, position, data)
            self.counts["read_groups"] += 1
            self.counts["read_bytes"] += len(data)
            if time.perf_counter() >= slice_ends_s:
                await asyncio.sleep(0)
                if self._interruptions != interruptions:
                    raise _Interrupted
                slice_ends_s = time.perf_counter() + SLICE_S
        state.caught_up = len(groups) < GROUPS_PER_READ
        if state.caught_up:
            state.caught_up_s = began_s
            self._ended(partition, began_s)
        if state.caught_up and state.away_since_s is not None:
            state.away_since_s = None
            self._applier.set_away(partition, "")
        if state.caught_up and not state.entered:
            state.entered = True
            if all(other.entered for other in self.partitions):
                self._caught_up.set()
