"""Which streams this replica follows: leases on one side, the ZMQ ingest on the other, the log in between.

    lease taken   it is written into the log and read back. By then all that older holders appended has been applied
                  here, and nothing more of theirs will be. Only now the stream is followed, from behind the last batch
                  that is in the picture
    lease lost    from this instant on nothing more of the pod is appended

What the streams bring goes through the log under the epoch of the lease. While the log is away, beginning to follow is
tried again until the lease ends. When the process ends, leases are given up first: entries that are still on their way
are fenced by the next holder, which replays them.

Bounds: one task a pod that is being taken.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Protocol

from app.errors import LogAway, Overloaded
from app.pods import PodSpec
from app.replication.applier import Fenced
from app.replication.leases import Leases, Scripts
from app.replication.log_writer import LogWriter

logger = logging.getLogger(__name__)

RETRY_S = 0.1  # beyond what the log itself was waited for


class Streams(Protocol):
    """The part of ZmqIngest that is needed."""

    def pod_added(self, spec: PodSpec) -> None: ...
    def pod_removed(self, name: str) -> None: ...
    def grant(self, name: str) -> None: ...
    def withdraw(self, name: str) -> None: ...


class Following:
    """A PodListener and the LeaseListener of its leases. All calls are made from the event loop's thread."""

    def __init__(
        self,
        redis: Scripts,
        writer: LogWriter,
        *,
        partitions: int,
        partition_of: Callable[[str], int],
        key_of: Callable[[int, str], str],
        ttl_s: float,
    ) -> None:
        self._writer = writer
        self._streams: Streams | None = None
        self._taking: dict[str, asyncio.Task[None]] = {}
        self._counts = {"granted": 0, "takings_failed": 0, "outlived": 0}
        self.leases = Leases(
            redis,
            self,
            replica=secrets.token_hex(8),
            partitions=partitions,
            partition_of=partition_of,
            key_of=key_of,
            ttl_s=ttl_s,
        )

    def attach(self, streams: Streams) -> None:
        self._streams = streams

    def start(self) -> None:
        self.leases.start()

    async def stop(self) -> None:
        """The other replicas may go on at once."""
        await self.leases.stop()
        for task in self._taking.values():
            task.cancel()
        await asyncio.gather(*self._taking.values(), return_exceptions=True)

    # -- PodListener: the streams first, or a lease could be taken of what they do not know yet

    def pod_added(self, spec: PodSpec) -> None:
        self._attached.pod_added(spec)
        self.leases.pod_added(spec)

    def pod_removed(self, name: str) -> None:
        self._attached.pod_removed(name)
        self.leases.pod_removed(name)

    # -- LeaseListener

    def lease_taken(self, pod: str, epoch: int) -> None:
        task = asyncio.create_task(self._take(pod, epoch), name=f"take {pod}")
        self._taking[pod] = task
        task.add_done_callback(functools.partial(self._taken, pod))

    def lease_lost(self, pod: str) -> None:
        task = self._taking.pop(pod, None)
        if task is not None:
            task.cancel()
        self._attached.withdraw(pod)

    # -- how it goes

    def gauges(self) -> Mapping[str, int]:
        return {**self.leases.gauges(), "taking": len(self._taking)}

    def counters(self) -> Mapping[str, int]:
        return {**self.leases.counters(), **self._counts}

    # -- inside

    @property
    def _attached(self) -> Streams:
        assert self._streams is not None, "there is nothing to grant yet"
        return self._streams

    def _taken(self, pod: str, task: asyncio.Task[None]) -> None:
        if self._taking.get(pod) is task:
            del self._taking[pod]

    async def _take(self, pod: str, epoch: int) -> None:
        while self.leases.epoch(pod) == epoch:
            try:
                await self._writer.take_lease(pod, epoch)
            except (LogAway, Overloaded):
                self._counts["takings_failed"] += 1
                await asyncio.sleep(RETRY_S)
            except Fenced as error:
                # A pod was removed meanwhile, this one (and came back) or one with a newer lease; or the clock of Redis
                # went back. A newer lease is needed.
                self._counts["outlived"] += 1
                logger.warning("pod %s: %s; another lease is asked for", pod, error)
                self.leases.give_up(pod, epoch)
                return
            except Exception:  # the outermost frame of this task: it must not end without a word
                logger.exception("pod %s: the lease (epoch %d) could not be used", pod, epoch)
                self.leases.give_up(pod, epoch)
                return
            else:
                if self.leases.epoch(pod) == epoch:
                    self._counts["granted"] += 1
                    self._attached.grant(pod)
                return
