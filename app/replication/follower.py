"""Reads the log and hands it to the applier, one task a partition.

While Redis is away the picture stays as it is and is served, and its pods' rows say that they are degraded and why; on
return reading goes on from the position. Before that,
and at the start, it is made sure that it is still the same log: the last group that was applied here must be there. If
it is not, Redis has lost what it had, or it was trimmed past this replica; then nothing more is applied, the
partition says so (`trouble`), the replica is not ready, and it looks again from time to time.

Groups are applied in slices of SLICE_S, so that queries wait for a slice at most, and for one group at least.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable

from app.errors import LogAway
from app.replication.applier import Applier
from app.replication.entries import UnknownEntry
from app.replication.redis_log import BEGINNING, GROUPS_PER_READ, RedisLog, Terms, order

logger = logging.getLogger(__name__)

SLICE_S = 0.002
RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # between one try and the next
FAILURES_TOLD = (
    2  # in a row, from which on the partition is away: a connection that only broke is made anew before
)


@dataclasses.dataclass(slots=True)
class PartitionState:
    """How the reading of one partition goes."""

    entered: bool = False  # it has been read to its end since the start
    caught_up: bool = False  # all that was there at the last look has been applied
    trouble: str = "the log has not been read yet"  # "" while it is being read
    away_since_s: float | None = None  # Unix time; None: rows do not say so


class LogBroken(LogAway):
    """The log is not the one that was read before, or has a hole where we are."""


class Follower:
    """All calls on the service's thread; `wall` gives Unix time."""

    def __init__(
        self, log: RedisLog, applier: Applier, terms: Terms, *, wall: Callable[[], float] = time.time
    ) -> None:
        self._log = log
        self._applier = applier
        self._terms = terms
        self._wall = wall
        self.partitions = [PartitionState() for _ in range(terms.partitions)]
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
    def trouble(self) -> str:
        return next((state.trouble for state in self.partitions if state.trouble), "")

    async def run(self, partition: int) -> None:
        """Until it is cancelled."""
        state = self.partitions[partition]
        failures = 0
        while True:
            try:
                await self._enter(partition)
                if failures:
                    self.counts["reconnects"] += 1
                    logger.info("partition %d of the log is read again", partition)
                failures = 0
                state.trouble = ""
                while True:
                    await self._read(partition, state)
            except (LogAway, UnknownEntry) as error:
                self.counts["read_failures"] += 1
                if str(error) != state.trouble:
                    logger.warning("partition %d of the log is not read: %s", partition, error)
                state.trouble = str(error)
                state.caught_up = False
                if failures + 1 == FAILURES_TOLD:
                    state.away_since_s = state.away_since_s or self._wall()
                    self._applier.set_away(partition, f"the log is away: {error}")
                await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
                failures += 1

    async def _enter(self, partition: int) -> None:
        """Raises LogBroken when it is not the log that was read before, or not one for us."""
        found = await self._log.agree(self._terms)
        mine = self._applier.state
        differing = [
            name
            for name in ("version", "partitions", "fuzzy", "count_copies")
            if getattr(found, name) != getattr(self._terms, name)
        ]
        if differing:
            raise LogBroken(
                f"the log was made with other settings than these: {', '.join(differing)}; "
                "all replicas need the same, and another namespace starts a new log"
            )
        if mine.log == "":
            mine.log = found.log
        if mine.log != found.log:
            raise LogBroken("Redis lost the log: there is another one now")
        position = mine.positions[partition]
        if position != BEGINNING and not await self._log.has(partition, position):
            raise LogBroken(f"the log does not have the group {position}, which was applied here")

    async def _read(self, partition: int, state: PartitionState) -> None:
        position = self._applier.state.positions[partition]
        groups = await self._log.read(partition, position, wait=state.caught_up)
        state.caught_up = False
        slice_ends_s = time.perf_counter() + SLICE_S
        for position, data in groups:
            self._applier.apply(partition, position, data)
            self.counts["read_groups"] += 1
            self.counts["read_bytes"] += len(data)
            if time.perf_counter() >= slice_ends_s:
                await asyncio.sleep(0)
                slice_ends_s = time.perf_counter() + SLICE_S
        state.caught_up = len(groups) < GROUPS_PER_READ
        if state.caught_up and state.away_since_s is not None:
            state.away_since_s = None
            self._applier.set_away(partition, "")
        if state.caught_up and not state.entered:
            state.entered = True
            if all(other.entered for other in self.partitions):
                self._caught_up.set()
