"""Who should follow which pod: what a replica claims and asks others for, so that each comes to its share.

A share is ceil(pods / replicas), counted over all partitions as this replica knows them, as if every wish were
fulfilled already. This module only computes wishes: app/replication/leases.py sends them, and Redis decides (leases.lua).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from app import hashing

if TYPE_CHECKING:
    from app.replication.leases import Partition

Verbs = list[tuple[str, str]]  # (claim | release | ask | unask, pod)


class Shares:
    """Of one replica. `wanted` are the pods that it would follow, by their partition; it and `partitions` are read as
    they are at each call."""

    def __init__(
        self, replica: str, partitions: Sequence[Partition], wanted: Mapping[str, Partition], *, ttl_s: float
    ) -> None:
        self._replica = replica
        self._partitions = partitions
        self._wanted = wanted
        self._ttl_s = ttl_s

    def claims(self, partition: Partition, now_s: float) -> Verbs:
        """Of free pods as many as bring this replica to its share, and those that nobody has claimed for a ttl."""
        free = [pod for pod in self._in_my_order(partition) if pod not in partition.leases]
        since = partition.free_since_s
        partition.free_since_s = {pod: since.get(pod, now_s) for pod in free}
        if not free:
            return []
        room = -(-len(self._wanted) // len(self.living())) - self._loads()[self._replica]
        overdue = [pod for pod in free if now_s - partition.free_since_s[pod] >= self._ttl_s]
        return [("claim", pod) for pod in dict.fromkeys(overdue + free[: max(0, room)])]

    def wishes(self, partition: Partition) -> Verbs:
        """At most what brings this replica to its share; up to the lower bound first, then from those above the
        upper one, so that those who ask at the same time do not ask for too much together."""
        loads = self._loads()
        mine = loads[self._replica]
        asked = [pod for pod, lease in partition.leases.items() if lease.asker == self._replica]
        low, above = divmod(len(self._wanted), len(self.living()))
        high = low + (above > 0)
        if mine > high and asked:
            return [("unask", pod) for pod in asked[: mine - high]]
        wishes: Verbs = []
        if mine >= high or any(self._wanted[p] is partition for p in partition.free_since_s):
            return wishes
        goal = low if mine < low else high
        for pod in self._in_my_order(partition):
            lease = partition.leases.get(pod)
            if mine >= goal:
                break
            if lease is None or lease.asker is not None or lease.holder == self._replica:
                continue
            if loads[lease.holder] > (low if goal == low else high):
                wishes.append(("ask", pod))
                loads[lease.holder] -= 1
                mine += 1
        return wishes

    def living(self) -> set[str]:
        return {self._replica}.union(*(partition.living for partition in self._partitions))

    def _loads(self) -> Counter[str]:
        """Pods by replica, as if every wish were fulfilled."""
        loads: Counter[str] = Counter()
        for pod, partition in self._wanted.items():
            lease = partition.leases.get(pod)
            if pod in partition.claiming:
                loads[self._replica] += 1
            elif lease is not None:
                loads[lease.asker or lease.holder] += 1
        return loads

    def _in_my_order(self, partition: Partition) -> list[str]:
        """Each replica begins with another pod, so that two of them seldom want the same one."""
        names = [pod for pod, at in self._wanted.items() if at is partition]
        return sorted(names, key=lambda pod: hashing.digest(encoded(pod) + self._replica.encode()))


def encoded(pod: str) -> bytes:
    return pod.encode(errors="surrogatepass")
