"""Which log is in force, and how a replica comes to a place in it from which it can go on.

A log has a number, which is part of the names of its streams. Before a partition is read, and again after whatever
went wrong, its place is made sure of:

    the log is as it was        reading goes on from the position
    it was trimmed past us      the newest snapshot of this log is loaded in place of what is held
    another one is in force     likewise; without a snapshot it began with nothing, and so do we
    there is none, or a part    Redis lost data. Of the replicas that see it, the one that had read furthest writes
    that we read is gone        its picture as the first snapshot of a new log; the others load it

With a new log, what was accepted and not yet given back by the old one is sent again, in order; readers know by its
number what the picture has already. Followed streams are resumed by their holders behind the last batch in the
picture. A source that posts without numbers cannot show whether something of it is lost: it is degraded.

While a picture is replaced, the replica is not ready and its rows are degraded. Snapshots of the running log are
written by whichever replica is first, and the log is trimmed to the older of the two that are kept.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from app.errors import LogAway, SnapshotRefused, StoreFailed
from app.replication.applier import Applier, beginning
from app.replication.outbox import Outbox
from app.replication.redis_log import BEGINNING, RedisLog, Terms, order
from app.service import IndexerService
from app.snapshots.keeper import SnapshotKeeper
from app.snapshots.redis_store import RedisStore

logger = logging.getLogger(__name__)

CANDIDACY_S = 1.5  # for the others to see that the log is lost, after whoever saw it first
ROUNDS_LOST_MAX = 8  # behind a candidate that does nothing; then candidates begin anew
LOST_IT = "Redis lost the log, or a part of it"
LOST = "Redis lost a part of the log, and its batches have no numbers that show what was in it"


class LogBroken(LogAway):
    """The log cannot be gone on with from where we are."""


class Interrupt(Protocol):
    """Follower.interrupt."""

    def __call__(self, cause: str, *, replaced: bool) -> None: ...


def _nobody_reads(cause: str, *, replaced: bool) -> None:
    pass


class Generations:
    """Of one replica. `interrupt` makes every reader begin anew; what it had read, it does not apply."""

    def __init__(
        self,
        log: RedisLog,
        terms: Terms,
        service: IndexerService,
        applier: Applier,
        outbox: Outbox,
        *,
        replica: str,
        keeper: SnapshotKeeper,
        store: RedisStore,
        keep_s: float,
        interval_s: float,
    ) -> None:
        self._log = log
        self._terms = terms
        self._service = service
        self._applier = applier
        self._outbox = outbox
        self._replica = replica
        self._keeper = keeper
        self._store = store
        self._keep_s = keep_s
        self._interval_s = interval_s
        self._lock = asyncio.Lock()
        self._rounds_lost = 0
        self.interrupt: Interrupt = _nobody_reads
        self.counts = {"snapshots_loaded": 0, "logs_begun": 0, "logs_left": 0, "trimmed_groups": 0}

    # -- the place in the log

    async def ensure(self, partition: int) -> None:
        """Returns when the partition can be read from its position. Raises LogAway when that cannot be now."""
        async with self._lock:
            found = await self._log.terms()
            if found is None:
                await self._contend(None)
                found = await self._log.terms()
                if found is None:
                    raise LogBroken("Redis lost the log once more")
            self._check(found)
            if self._applier.state.log != found.log:
                await self._enter(found.log)
            self._log.number = found.log
            if await self.is_whole(partition):
                self._outbox.send_again(partition)
                return
            position = self._applier.state.positions[partition]
            if order(position) < order(await self._log.trimmed(partition)):
                if not await self._load(found.log):
                    raise LogBroken(f"the log was trimmed past {position}, and there is no snapshot of it")
                return
            logger.error(
                "partition %d of the log does not have %s, which was applied here", partition, position
            )
            await self._contend(found)

    async def is_whole(self, partition: int) -> bool:
        """Nothing behind our position is missing."""
        position = self._applier.state.positions[partition]
        if position == BEGINNING:
            return await self._log.trimmed(partition) == BEGINNING
        return await self._log.has(partition, position)

    async def look(self) -> None:
        """Whether it is still the same log that is in force."""
        mine = self._applier.state.log
        if mine and not self._lock.locked():
            found = await self._log.terms()
            if (found is None or found.log != mine) and self._applier.state.log == mine:
                self.interrupt("another log is in force" if found else LOST_IT, replaced=False)

    def _check(self, found: Terms) -> None:
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

    async def _enter(self, number: str) -> None:
        mine = self._applier.state
        self._log.number = number
        if await self._load(number):
            return
        for partition in range(self._terms.partitions):
            if await self._log.trimmed(partition) != BEGINNING:
                raise LogBroken("the beginning of the log is gone, and there is no snapshot of it")
        if mine.log:
            self.counts["logs_left"] += 1
            logger.error("log %s is lost, and %s began with nothing: so does this replica", mine.log, number)
            self._empty()
        self._applier.state = beginning(number, self._terms.partitions)
        self._send_again()

    async def _load(self, number: str) -> bool:
        try:
            saved = await self._keeper.load(number, empty=self._empty, adopted=self._say_away)
        except (StoreFailed, SnapshotRefused) as error:
            raise LogBroken(f"the snapshot cannot be read: {error}") from error
        if saved is None:
            return False
        self._applier.recall(saved)
        self._log.number = number
        self._send_again()
        self.counts["snapshots_loaded"] += 1
        return True

    def _empty(self) -> None:
        self.interrupt("a snapshot is being read", replaced=True)
        # Whatever comes of it, it is no place in a log until it is whole.
        self._applier.state = beginning("", self._terms.partitions)
        for name in list(self._service.pods):
            self._service.drop_pod(name)
        self._service.owners.clear_all()

    def _say_away(self) -> None:
        self._service.set_away("a snapshot is being read", concerns=lambda _pod: True)

    def _send_again(self) -> None:
        for partition, numbers in enumerate(self._applier.state.numbers):
            self._outbox.send_again(partition, numbers.get(self._replica, 0))

    # -- a new log

    async def _contend(self, before: Terms | None) -> None:
        """Makes the new log, or raises LogBroken for the one who does."""
        mine = self._applier.state
        if mine.log:
            self.interrupt(LOST_IT, replaced=False)
        places = [order(position) for position in mine.positions]
        rank = [sum(milliseconds for milliseconds, _ in places), sum(number for _, number in places)]
        await self._log.stand(self._replica, msgspec.json.encode([*rank, self._replica]))
        await asyncio.sleep(CANDIDACY_S)
        ranks = {name: msgspec.json.decode(told) for name, told in (await self._log.candidates()).items()}
        if not ranks or max(ranks, key=lambda name: ranks[name]) != self._replica:
            self._rounds_lost += 1
            if self._rounds_lost >= ROUNDS_LOST_MAX:
                self._rounds_lost = 0
                await self._log.forget_candidates()
            if mine.log:
                raise LogBroken("the log is lost, and another replica makes a new one")
            raise LogBroken("there is no log yet, and another replica makes it")
        self._rounds_lost = 0
        terms = msgspec.structs.replace(self._terms, log=secrets.token_hex(12))
        if not mine.log:
            if not await self._log.succeed(before, terms):
                raise LogBroken("another replica made the log")
            await self._log.forget_candidates()
            return
        self._service.doubt(LOST)
        base = msgspec.structs.replace(mine, log=terms.log, positions=[BEGINNING] * terms.partitions)
        if not await self._keeper.save(place=lambda saved: self._applier.place(saved, base)):
            raise LogBroken("the first snapshot of a new log could not be written")
        if not await self._log.succeed(before, terms):
            raise LogBroken("another replica made a new log")
        logger.error("Redis lost the log: %s begins with what this replica holds", terms.log)
        self.counts["logs_begun"] += 1
        self._applier.state = base
        self._log.number = terms.log
        self._send_again()
        await self._log.forget_candidates()
        await self._log.remove(mine.log, terms.partitions)

    # -- snapshots of the running log

    async def save(self, is_caught_up: Callable[[], bool]) -> None:
        """A snapshot, when the newest is old enough, and the log trimmed behind it. Raises LogAway, StoreFailed."""
        async with self._lock:
            mine = self._applier.state.log
            found = await self._log.terms()
            if found is None or not mine or found.log != mine or not is_caught_up():
                return
            newest = await self._store.placed("newest")
            if newest is not None and newest.log == mine and time.time() - newest.at_s < self._interval_s:
                self._keeper.saw(newest.at_s)
                return
            if await self._keeper.save():
                await self._trim(mine)

    async def _trim(self, number: str) -> None:
        kept = [await self._store.placed(name) for name in ("newest", "previous")]
        places = [placed.positions for placed in kept if placed is not None and placed.log == number]
        if not places:
            return
        young = f"{int((await self._log.now_s() - self._keep_s) * 1000)}-0"
        for partition in range(self._terms.partitions):
            before = min([young, *(positions[partition] for positions in places)], key=order)
            if order(before) > order(await self._log.trimmed(partition)):
                self.counts["trimmed_groups"] += await self._log.trim(partition, before)
