"""Which replica follows which pod: leases in Redis, each with an epoch that fences the replica that lost it.

Every replica makes an exchange with every partition (leases.lua, one script, atomic) a few times each ttl: it says that
it is alive, which renews all that it holds there, and learns who else is. Liveness belongs to the replica and not to
the lease, so an exchange costs the same for one pod and for ten thousand; leases are read only when one changed.

What holds, and why:
  one holder     Redis decides, by its own clock. A holder counts its ttl from before it asked, on its monotonic clock
                 and less a margin, and stops by itself: also while Redis cannot be reached, and before Redis gives
                 the lease to another. No two clocks are compared, only their rates are trusted to the margin.
  one writer     a process that slept through its ttl may still have something on its way. So `epoch` looks at the
                 clock each time, what is appended carries the epoch, and readers leave out what is older than the
                 newest epoch that they have seen of the pod. Epochs rise for ever, also where Redis lost its data.
  it moves on    a dead replica's leases are free one ttl after its last exchange, and the others look just then.
                 An orderly end releases at once.
  it is spread   a replica claims free pods up to its share, ceil(pods / replicas). With less than its share it asks
                 the replica that has most for a pod, and is handed that pod by name, so nothing moves without need.
                 A pod that nobody has claimed for a whole ttl (its replica cannot reach that partition) any replica
                 may claim.

Two replicas can hold a lease only where Redis forgets that it gave one (a failover to a copy that lags behind, a clock
that jumps forward): then the epochs decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from app.pods import PodSpec
from app.redis_faults import REDIS_FAULTS
from app.replication.shares import Shares, Verbs, encoded

logger = logging.getLogger(__name__)

TTL_S = 2.0
EXCHANGES_PER_TTL = 4
MARGIN = 0.1  # part of the ttl by which a holder stops before Redis may give the lease away
VERBS_PER_EXCHANGE_MAX = 512  # the others follow at once


_SCRIPT = Path(__file__).with_name("leases.lua").read_text()


class Scripts(Protocol):
    """The part of a Redis client (alone or of a cluster, without `decode_responses`) that leases need."""

    def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Any: ...


class LeaseListener(Protocol):
    """Called on the event loop, in turns: taken, lost, taken ..."""

    def lease_taken(self, pod: str, epoch: int) -> None: ...
    def lease_lost(self, pod: str) -> None:
        """At once: behind this call another replica may have it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    epoch: int
    holder: str
    asker: str | None = None  # the replica that the holder is asked to hand it to


@dataclasses.dataclass(slots=True)
class LeaseCounters:
    taken: int = 0
    lost: int = 0  # without having been given up
    handed_over: int = 0  # to the replica that asked
    exchanges: int = 0
    exchanges_failed: int = 0  # Redis did not answer, or not in time


@dataclasses.dataclass(slots=True)
class Partition:
    number: int
    keys: tuple[str, str]  # leases, replicas
    change: bytes = b"0"  # the last one that is known
    leases: dict[str, Lease] = dataclasses.field(default_factory=dict)
    living: frozenset[str] = frozenset()
    held: dict[str, int] = dataclasses.field(default_factory=dict)  # pod -> epoch, as the listener was told
    until_s: float = float("-inf")  # on the clock: this replica stops being a holder
    next_death_s: float = float("inf")  # from now: when the first of the others is dead unless it speaks
    expiry: asyncio.TimerHandle | None = None
    free_since_s: dict[str, float] = dataclasses.field(default_factory=dict)
    claiming: frozenset[str] = frozenset()  # sent, not answered
    stale: bool = False  # something changed since it was last planned what to do
    failing: bool = False
    wake: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class Leases:
    """A PodListener of one replica. All calls are made from the event loop's thread.

    `partition_of` gives the partition of a pod, `key_of` the name of one of its keys; the names of a partition must
    share a hash tag. `replica` is new with every process: who starts again holds nothing.
    """

    def __init__(
        self,
        redis: Scripts,
        listener: LeaseListener,
        *,
        replica: str,
        partitions: int,
        partition_of: Callable[[str], int],
        key_of: Callable[[int, str], str],
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert replica.isalnum(), "a replica's name is one word"
        self._redis = redis
        self._listener = listener
        self._replica = replica
        self._partition_of = partition_of
        self._ttl_s = ttl_s
        self._clock = clock
        self._partitions = [
            Partition(number, (key_of(number, "leases"), key_of(number, "replicas")))
            for number in range(partitions)
        ]
        self._wanted: dict[str, Partition] = {}
        self._shares = Shares(replica, self._partitions, self._wanted, ttl_s=ttl_s)
        self._given_up: dict[
            str, int
        ] = {}  # pod -> epoch that is of no use: released, a newer one is claimed
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._counters = LeaseCounters()

    # -- PodListener

    def pod_added(self, spec: PodSpec) -> None:
        """From now on this replica would follow it. A pod without a stream needs no lease."""
        if spec.zmq_endpoint is not None:
            partition = self._wanted[spec.name] = self._partitions[self._partition_of(spec.name)]
            self._changed()
            partition.wake.set()

    def pod_removed(self, name: str) -> None:
        partition = self._wanted.pop(name, None)
        if partition is not None:
            partition.free_since_s.pop(name, None)
            self._given_up.pop(name, None)
            self._lose(partition, name)
            self._changed()
            partition.wake.set()  # its lease is released

    def give_up(self, name: str, epoch: int) -> None:
        """This lease is released; who claims the pod next, this replica maybe, gets a newer epoch."""
        partition = self._wanted.get(name)
        if partition is not None and partition.held.get(name) == epoch:
            self._given_up[name] = epoch
            self._lose(partition, name)
            partition.stale = True
            partition.wake.set()

    # -- who holds what

    def epoch(self, pod: str) -> int | None:
        """Of the lease that this replica holds at this instant; None: it must not append anything of the pod.

        Asked before every append: the lease may have gone since the last await.
        """
        partition = self._wanted.get(pod)
        if partition is None or self._clock() >= partition.until_s:
            return None
        return partition.held.get(pod)

    def held(self) -> dict[str, int]:
        """Pod -> epoch of what this replica holds."""
        now_s = self._clock()
        return dict(
            itertools.chain.from_iterable(p.held.items() for p in self._partitions if now_s < p.until_s)
        )

    def holder(self, pod: str) -> str | None:
        """The replica that follows the pod, as far as is known here."""
        lease = self._partitions[self._partition_of(pod)].leases.get(pod)
        return None if lease is None else lease.holder

    def gauges(self) -> Mapping[str, int]:
        return {"held": len(self.held()), "replicas": len(self._shares.living()), "pods": len(self._wanted)}

    def counters(self) -> Mapping[str, int]:
        return dataclasses.asdict(self._counters)

    # -- the lifetime

    def start(self) -> None:
        """On the running event loop."""
        assert not self._tasks, "leases start once"
        self._tasks = [
            asyncio.create_task(self._keep(partition), name=f"leases {partition.number}")
            for partition in self._partitions
        ]

    async def stop(self) -> None:
        """Gives up every lease, and what Redis knows of this replica: the others need not wait for the ttl."""
        await self._end_tasks()
        for partition in self._partitions:
            if partition.expiry is not None:
                partition.expiry.cancel()
            partition.until_s = float("-inf")
            for pod in list(partition.held):
                self._lose(partition, pod)
        await asyncio.gather(*(self._leave(partition) for partition in self._partitions))

    async def _end_tasks(self) -> None:
        # Python 3.11 can lose a cancellation in asyncio.wait_for, which the client sends its commands with.
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _leave(self, partition: Partition) -> None:
        try:
            await self._exchange(partition, [], ttl_s=0.0)
        except REDIS_FAULTS as error:
            logger.warning("leases are not released, and end with their ttl: %s", _said(error))

    # -- the exchanges

    async def _keep(self, partition: Partition) -> None:
        interval_s = self._ttl_s / EXCHANGES_PER_TTL
        while not self._stopping:
            wait_s = interval_s
            partition.wake.clear()
            try:
                await self._round(partition)
                wait_s = min(interval_s, partition.next_death_s + 0.002)
                partition.failing = False
            except REDIS_FAULTS as error:
                self._counters.exchanges_failed += 1
                if not partition.failing:  # once for each time that it begins
                    logger.warning("leases of partition %d: %s", partition.number, _said(error))
                partition.failing = partition.stale = True
            except Exception:  # the outermost loop of this task: it must outlive a fault of ours, and say so
                self._counters.exchanges_failed += 1
                logger.exception("leases of partition %d failed", partition.number)
            if not self._stopping:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await partition.wake.wait()

    async def _round(self, partition: Partition) -> None:
        await self._exchange(partition, [])
        partition.stale |= bool(partition.free_since_s)  # nobody claims them: for how long already?
        while partition.stale and not self._stopping:
            partition.stale = False
            self._take_note(partition)
            if verbs := self._plan(partition)[:VERBS_PER_EXCHANGE_MAX]:
                await self._exchange(partition, verbs)  # what it changes makes this stale again

    async def _exchange(self, partition: Partition, verbs: Verbs, *, ttl_s: float | None = None) -> None:
        ttl_s = self._ttl_s if ttl_s is None else ttl_s
        arguments: list[Any] = [self._replica, int(ttl_s * 1_000), partition.change]
        for verb, pod in verbs:
            arguments += (verb, encoded(pod))
        partition.claiming = frozenset(pod for verb, pod in verbs if verb in ("claim", "ask"))
        asked_s = self._clock()
        try:
            async with asyncio.timeout(self._ttl_s / 2):
                call: Awaitable[Any] = self._redis.eval(_SCRIPT, 2, *partition.keys, *arguments)
                change, living, leases = await call
        finally:
            partition.claiming = frozenset()
        self._counters.exchanges += 1
        if ttl_s > 0:
            self._renewed(partition, asked_s)
            self._learn(partition, change, living, leases)

    def _renewed(self, partition: Partition, asked_s: float) -> None:
        if self._clock() >= partition.until_s:
            self._expire(partition)  # something may have been left out since: what is held is taken anew
        partition.until_s = asked_s + self._ttl_s * (1 - MARGIN)
        if partition.expiry is not None:
            partition.expiry.cancel()
        delay_s = max(0.0, partition.until_s - self._clock())
        partition.expiry = asyncio.get_running_loop().call_later(delay_s, self._expire, partition)

    def _expire(self, partition: Partition) -> None:
        """Nothing is held here any more, whether Redis can say so or not."""
        partition.until_s = float("-inf")
        partition.stale = True  # what Redis still says is ours is taken again as soon as it answers
        for pod in list(partition.held):
            self._counters.lost += 1
            self._lose(partition, pod)

    def _learn(
        self, partition: Partition, change: bytes, living: list[Any], leases: list[bytes] | None
    ) -> None:
        remaining_s = {replica.decode(): left / 1_000 for replica, left in _pairs(living)}
        others = [left_s for replica, left_s in remaining_s.items() if replica != self._replica]
        partition.next_death_s = min(others, default=float("inf"))
        if partition.living != remaining_s.keys():
            partition.living = frozenset(remaining_s)
            self._changed()
        partition.change = change
        if leases is not None:
            partition.leases = {_decoded(pod): _lease(value) for pod, value in _pairs(leases)}
            self._changed()

    def _changed(self) -> None:
        """Shares are counted over all partitions, so each has to look again."""
        for partition in self._partitions:
            partition.stale = True

    def _take_note(self, partition: Partition) -> None:
        """Of what this replica holds by now, and what it does not any more."""
        for pod, epoch in list(partition.held.items()):
            lease = partition.leases.get(pod)
            if lease is None or (lease.holder, lease.epoch) != (self._replica, epoch):
                self._counters.lost += 1
                logger.warning("pod %s: the lease (epoch %d) is lost", pod, epoch)
                self._lose(partition, pod)
        if self._clock() >= partition.until_s:
            return
        for pod, lease in partition.leases.items():
            if lease.holder != self._replica or lease.asker is not None:
                continue
            if lease.epoch <= self._given_up.get(pod, 0):
                continue
            if pod not in partition.held and pod in self._wanted:
                self._counters.taken += 1
                partition.held[pod] = lease.epoch
                logger.info("pod %s is followed by this replica now (epoch %d)", pod, lease.epoch)
                self._listener.lease_taken(pod, lease.epoch)

    def _lose(self, partition: Partition, pod: str) -> None:
        if partition.held.pop(pod, None) is not None:
            self._listener.lease_lost(pod)

    # -- what to do next

    def _plan(self, partition: Partition) -> Verbs:
        """Whatever has to be said in this partition; lets go of what will be handed over."""
        verbs: Verbs = []
        for pod, lease in partition.leases.items():
            if lease.holder != self._replica:
                continue
            if pod not in self._wanted or lease.epoch <= self._given_up.get(pod, 0):
                verbs.append(("release", pod))
            elif lease.asker is not None:
                self._lose(partition, pod)
                self._counters.handed_over += 1
                verbs.append(("release", pod))
        if not verbs:
            verbs = self._shares.claims(partition, self._clock()) or self._shares.wishes(partition)
        return verbs


def _pairs(flat: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _lease(value: bytes) -> Lease:
    epoch, holder, asker = value.decode().split(" ")
    return Lease(int(epoch), holder, None if asker == "-" else asker)


def _decoded(pod: bytes) -> str:
    return pod.decode(errors="surrogatepass")


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
