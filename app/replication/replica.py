"""One replica: the parts of replication put together, their life, and how it goes with them.

    accept    log_writer -> coder -> outbox -> Redis
    apply     Redis -> follower -> applier -> service

Nothing is applied that was not read back from the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Any

from app.config import Settings
from app.errors import IndexerError, LogAway, StoreFailed
from app.fuzzy.fuzzy_index import FuzzyIndex
from app.index.prefix_index import PrefixIndex
from app.pods import PodSpec
from app.replication.applier import Applier
from app.replication.coder import Coder
from app.replication.entries import VERSION, partition_of
from app.replication.follower import Follower
from app.replication.following import Following
from app.replication.generations import Generations
from app.replication.log_writer import FeedWriter, LogWriter
from app.replication.outbox import Outbox
from app.replication.redis_log import RedisLog, Terms
from app.service import IndexerService
from app.snapshots.keeper import SnapshotKeeper
from app.snapshots.redis_store import RedisStore

logger = logging.getLogger(__name__)

CANCEL_AGAIN_S = 0.2
LOOK_S = 1.0  # between two looks whether another log is in force
STORE_TIMEOUT_S = 10.0  # of one piece of a snapshot


class Replica:
    """Of one service, from `start` on the running loop to `stop`. `writer` is how everything changes it."""

    def __init__(
        self,
        settings: Settings,
        service: IndexerService,
        index: PrefixIndex,
        contents: FuzzyIndex | None,
    ) -> None:
        self.name = settings.replica_id or f"{socket.gethostname()}-{os.getpid()}"
        # Another process of the same name must not be taken for this one: its numbers begin anew.
        incarnation = f"{self.name}:{secrets.token_hex(6)}"
        self._settings = settings
        self._service = service
        partitions = self._partitions = settings.redis_partitions
        self.log = _log(settings)
        self._coder = Coder(service, shingle=0 if contents is None else contents.shingle)
        self._outbox = Outbox(
            incarnation,
            partitions,
            bytes_max=settings.redis_outbox_bytes_max,
            append=self._append,
            landed=self._coder.land,
        )
        self.applier = Applier(service, incarnation, partitions, settle=self._outbox.settle)
        store = _snapshot_store(settings, self.log)
        self.keeper = SnapshotKeeper(
            service,
            index,
            store,
            configured=frozenset(),
            interval_s=settings.snapshot_interval_s,
            place=self.applier.place,
        )
        self._generations = Generations(
            self.log,
            _terms(settings),
            service,
            self.applier,
            self._outbox,
            replica=incarnation,
            keeper=self.keeper,
            store=store,
            keep_s=settings.redis_keep_s,
            interval_s=settings.snapshot_interval_s,
        )
        self._follower = Follower(
            self.log,
            self.applier,
            self._generations,
            partitions=partitions,
            keep_s=settings.redis_keep_s,
            ended=self._outbox.has_ended,
        )
        self._generations.interrupt = self._follower.interrupt
        self.writer = LogWriter(
            service,
            self._coder,
            self._outbox,
            self.applier,
            partitions=partitions,
            answer_timeout_s=settings.redis_answer_timeout_s,
        )
        self.following = _following(settings, self.log, self.writer)
        self._feed = self.writer.feed(self.following.leases.epoch)
        self._tasks: list[asyncio.Task[None]] = []
        self._unregistered: list[PodSpec] = []
        service.ask_before_silence(self.writer.ask_for_silence)

    # -- life

    def start(self, configured: list[PodSpec]) -> None:
        """Begins to read; registers the configured pods as soon as the log has been read once."""
        self._unregistered = list(configured)
        for partition in range(self._partitions):
            self._spawn(self._follower.run(partition), f"log-read-{partition}")
            self._spawn(self._outbox.run(partition), f"log-append-{partition}")
        self._spawn(self._register(), "log-pods")
        self._spawn(self._follow(), "log-follow")
        self._spawn(self._look(), "log-look")
        self._spawn(self._keep(), "log-snapshots")

    async def stop(self, grace_s: float) -> None:
        """Waits for what was accepted to be in the log, `grace_s` at the most, and leaves Redis. The leases have been
        given up before (`following`)."""
        try:
            async with asyncio.timeout(grace_s):
                await self._outbox.drained()
        except TimeoutError:
            logger.error("%d entries never reached the log: it is away", self._outbox.entries)
        pending = set(self._tasks)
        while pending:
            # Again and again: Python 3.11 can lose a cancellation in asyncio.wait_for, which the client waits with.
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
        self._tasks.clear()
        await self.log.close()

    async def _append(self, partition: int, group: bytes) -> str:
        if self.applier.state.log != self.log.number:
            # Before it is known what the picture has of ours, nothing new may come before what must be sent again.
            raise LogAway("the place in the log is being looked for")
        return await self.log.append(partition, group)

    def _spawn(self, work: Any, name: str) -> None:
        self._tasks.append(asyncio.create_task(self._outlive(work, name), name=name))

    async def _outlive(self, work: Any, name: str) -> None:
        try:
            await work
        except Exception:  # the outermost of this task: it must not end without a word
            logger.exception("the task %s ended by a fault of ours", name)
            raise

    async def _register(self) -> None:
        await self._follower.caught_up_once()
        while self._unregistered:
            spec = self._unregistered[0]
            known = self._service.pods.get(spec.name)
            try:
                if known is None or known.spec != spec:
                    await self.writer.register(spec)
            except LogAway:
                continue  # it has waited its time already
            except IndexerError as error:
                logger.error("pod %s of the configuration is not registered: %s", spec.name, error)
            self._unregistered.pop(0)

    async def _follow(self) -> None:
        """A replica that does not know the pods yet would hold leases and do nothing with them."""
        await self._follower.caught_up_once()
        self.following.start()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(LogAway):  # the readers say so
                await self._generations.look()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._settings.snapshot_interval_s * random.uniform(0.9, 1.1))
            try:
                await self._generations.save(lambda: self._follower.is_caught_up)
            except (LogAway, StoreFailed) as error:
                logger.warning("no snapshot: %s", error)
            except Exception:  # the outermost loop of this task: it must outlive a fault of ours, and say so
                logger.exception("a snapshot failed")

    # -- for whoever follows streams under leases

    def feed(self) -> FeedWriter:
        """The writer of a ZmqIngest, under the leases of this replica."""
        return self._feed

    def is_blocked(self) -> bool:
        """The outbox has no room for what is followed; `on_room` is told when it has again."""
        return self._outbox.is_full

    def on_room(self, listener: Callable[[], None]) -> None:
        self._outbox.room_listeners.append(listener)

    # -- how it goes

    def missing(self) -> list[tuple[str, str]]:
        """(place, sentence) of what a router should wait for: the log read to its end, and not far behind."""
        found = []
        for partition, state in enumerate(self._follower.partitions):
            place = f"log.{partition}"
            lag_s = self._follower.lag_s(partition)
            if not state.entered:
                found.append((place, state.trouble or "the log is being read"))
            elif lag_s > self._settings.redis_lag_s_max:
                bound = f"redis_lag_s_max = {self._settings.redis_lag_s_max:g}"
                found.append((place, f"{lag_s:.0f} s behind: {bound}"))
        found += [(f"pods.{spec.name}", "is not registered yet") for spec in self._unregistered]
        return found

    def stats(self) -> dict[str, Any]:
        state = self.applier.state
        return {
            "replica": self.name,
            "log": state.log,
            "positions": list(state.positions),
            "lag_s": max(map(self._follower.lag_s, range(self._partitions))),
            "away_s": self._follower.away_s,
            "trouble": self._follower.trouble or self._outbox.trouble,
            "outbox_entries": self._outbox.entries,
            "outbox_bytes": self._outbox.bytes,
            "leases": self.following.leases.held(),
            **self.counters(),
        }

    def gauges(self) -> Mapping[str, float]:
        return {
            "lag_seconds": max(map(self._follower.lag_s, range(self._partitions))),
            "away_seconds": self._follower.away_s,
            "partitions_in_trouble": sum(bool(state.trouble) for state in self._follower.partitions),
            "outbox_entries": self._outbox.entries,
            "outbox_bytes": self._outbox.bytes,
        }

    def counters(self) -> Mapping[str, int]:
        return {
            **self._outbox.counts,
            **self._follower.counts,
            **self._generations.counts,
            **self.applier.counts,
            "unleased_entries": self._feed.unleased,
            "hashed_blocks": self._coder.hashed_blocks,
            "raw_blocks": self._coder.raw_blocks,
        }


def _log(settings: Settings) -> RedisLog:
    assert settings.redis_url is not None, "there is no replica without a log"
    return RedisLog(
        settings.redis_url.get_secret_value(),
        cluster=settings.redis_cluster,
        namespace=settings.redis_namespace,
        timeout_s=settings.redis_timeout_s,
    )


def _terms(settings: Settings) -> Terms:
    """Those that this replica needs; the number of the log is not known yet."""
    return Terms(
        log="",
        version=VERSION,
        partitions=settings.redis_partitions,
        fuzzy=settings.fuzzy,
        count_copies=settings.count_copies,
    )


def _snapshot_store(settings: Settings, log: RedisLog) -> RedisStore:
    return RedisStore(
        log.commands,
        tag=f"{{{settings.redis_namespace}}}:snapshot",
        timeout_s=max(settings.redis_timeout_s, STORE_TIMEOUT_S),
    )


def _following(settings: Settings, log: RedisLog, writer: LogWriter) -> Following:
    partitions = settings.redis_partitions
    return Following(
        log.commands,
        writer,
        partitions=partitions,
        partition_of=lambda pod: partition_of(pod, partitions),
        key_of=lambda number, name: f"{{{settings.redis_namespace}:{number}}}:{name}",
        ttl_s=settings.redis_lease_ttl_s,
    )
