"""Leases over a real redis-server: at most one holder at any instant, whatever dies, sleeps or is cut off."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

from app.hashing import digest
from app.pods import PodSpec
from app.replication.leases import MARGIN, Leases
from tests.replication.proxy import proxied
from tests.replication.redis_server import RedisServer, cluster_options, serving_redis

TTL_S = 0.6
LONG_TTL_S = 3.0  # where a lease that ends because the machine is busy would fail the test
PARTITIONS = 3
DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with serving_redis() as made:
        yield made


@pytest.fixture(autouse=True)
def empty(server: RedisServer) -> None:
    with redis.Redis(port=server.port) as client:
        client.flushall()


def key_of(partition: int, name: str) -> str:
    return f"{{kvindexer:test:{partition}}}:{name}"


def partition_of(pod: str) -> int:
    return digest(pod.encode(errors="surrogatepass")) % PARTITIONS


def pod_names(count: int) -> list[str]:
    return [f"pod-{number}" for number in range(count)]


class Fleet:
    """Replicas on one loop. What each is told is kept in one list, in the order in which it came."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.replicas: dict[str, Leases] = {}
        self.clients: dict[str, redis.asyncio.Redis] = {}
        self.told: list[tuple[str, str, str, int]] = []  # replica, taken or lost, pod, epoch
        self.following: dict[str, str] = {}  # pod -> replica, as the listeners know it
        self.faults: list[str] = []

    def add(
        self,
        name: str,
        pods: list[str],
        *,
        port: int | None = None,
        late: Late | None = None,
        **options: Any,
    ) -> Leases:
        client = self.clients[name] = redis.asyncio.Redis(port=port or self.port)
        if late is not None:
            late.client, options["clock"] = client, lambda: late.now_s
        made = self.replicas[name] = Leases(
            late or client,
            _Listener(self, name),
            replica=name,
            partitions=PARTITIONS,
            partition_of=partition_of,
            key_of=key_of,
            ttl_s=options.pop("ttl_s", TTL_S),
            **options,
        )
        for pod in pods:
            made.pod_added(PodSpec(pod, "m", zmq_endpoint="tcp://127.0.0.1:1"))
        made.start()
        return made

    async def stop(self, name: str) -> None:
        await self.replicas.pop(name).stop()
        await self.clients.pop(name).aclose()

    async def kill(self, name: str) -> None:
        """It says nothing more, and its listener hears nothing more: as with SIGKILL."""
        leases = self.replicas.pop(name)
        await leases._end_tasks()
        for partition in leases._partitions:
            if partition.expiry is not None:
                partition.expiry.cancel()
        for pod in [pod for pod, holder in self.following.items() if holder == name]:
            del self.following[pod]
        await self.clients.pop(name).aclose()

    def exchanges(self) -> dict[str, int]:
        return {name: replica.counters()["exchanges"] for name, replica in self.replicas.items()}

    def loads(self) -> dict[str, int]:
        return dict(Counter(self.following.values()))

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"{what}: {self.following}"
            await asyncio.sleep(0.005)

    async def until_spread(self, pods: int, *loads: int) -> None:
        def is_spread() -> bool:
            return sorted(self.loads().values()) == sorted(loads) and len(self.following) == pods

        await self.until(is_spread, f"{loads} of {pods}")


class _Listener:
    """Checks what must hold at every instant: nobody else acts as holder, and epochs rise."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet, self.name = fleet, name

    def lease_taken(self, pod: str, epoch: int) -> None:
        fleet = self.fleet
        if pod in fleet.following:
            self._fault(f"takes {pod} from {fleet.following[pod]}")
        for name, replica in fleet.replicas.items():
            if name != self.name and replica.epoch(pod) is not None:
                self._fault(f"takes {pod}, and {name} would still append")
        before = next((told for told in reversed(fleet.told) if told[2] == pod), None)
        if before is not None and (epoch < before[3] or (epoch == before[3] and before[0] != self.name)):
            self._fault(f"takes {pod} with epoch {epoch} after {before}")
        fleet.told.append((self.name, "taken", pod, epoch))
        fleet.following[pod] = self.name

    def lease_lost(self, pod: str) -> None:
        if self.fleet.following.pop(pod, None) != self.name:
            self._fault(f"lost {pod} without having it")
        epoch = next(told[3] for told in reversed(self.fleet.told) if told[2] == pod)
        self.fleet.told.append((self.name, "lost", pod, epoch))

    def _fault(self, what: str) -> None:
        self.fleet.faults.append(f"{self.name} {what}")


class Late:
    """A Redis whose answers are under way for so long, by a clock that goes on only then."""

    def __init__(self, way_s: float) -> None:
        self.client: redis.asyncio.Redis
        self.now_s = 0.0
        self.asked_s: dict[
            str, float
        ] = {}  # key of the leases -> when the last question left that was answered
        self._way_s = way_s

    async def eval(self, script: str, numkeys: int, *arguments: Any) -> Any:
        asked_s = self.now_s
        answer = await self.client.eval(script, numkeys, *arguments)
        self.now_s += self._way_s
        self.asked_s[arguments[0]] = asked_s
        return answer


@contextlib.asynccontextmanager
async def fleet_of(port: int) -> AsyncIterator[Fleet]:
    fleet = Fleet(port)
    try:
        yield fleet
    finally:
        for name in list(fleet.replicas):
            await fleet.stop(name)
    assert fleet.faults == []


def run(scene: Callable[[Fleet], Awaitable[None]], server: RedisServer) -> None:
    async def play() -> None:
        async with fleet_of(server.port) as fleet:
            await scene(fleet)

    asyncio.run(play())


def test_one_replica_holds_all_and_others_join_and_leave(server: RedisServer) -> None:
    async def scene(fleet: Fleet) -> None:
        pods = pod_names(8)
        fleet.add("a", pods, ttl_s=LONG_TTL_S)
        await fleet.until_spread(8, 8)
        fleet.add("b", pods, ttl_s=LONG_TTL_S)
        await fleet.until_spread(8, 4, 4)
        fleet.add("c", pods, ttl_s=LONG_TTL_S)
        await fleet.until_spread(8, 3, 3, 2)
        known = fleet.replicas["a"]
        await fleet.until(lambda: {pod: known.holder(pod) for pod in pods} == fleet.following, "a knows")
        for name, replica in fleet.replicas.items():
            assert set(replica.held()) == {pod for pod, holder in fleet.following.items() if holder == name}
            assert replica.gauges() == {"held": len(replica.held()), "replicas": 3, "pods": 8}
            assert replica.counters()["lost"] == 0
        moved = sum(told[1] == "lost" for told in fleet.told)
        assert moved <= 4 + 4, "no pod moves without need"
        await fleet.stop("a")
        await fleet.until_spread(8, 4, 4)

    run(scene, server)


def test_a_start_together_is_spread_too(server: RedisServer) -> None:
    async def scene(fleet: Fleet) -> None:
        pods = pod_names(31)
        for name in ("a", "b", "c", "d"):
            fleet.add(name, pods, ttl_s=LONG_TTL_S)
        await fleet.until_spread(31, 8, 8, 8, 7)
        for _ in range(10):  # what had been decided before may still be done
            told, exchanges = len(fleet.told), fleet.exchanges()

            def have_looked(before: dict[str, int] = exchanges) -> bool:
                return all(now >= before[name] + 4 * PARTITIONS for name, now in fleet.exchanges().items())

            await fleet.until(have_looked, "everybody looked again")
            if len(fleet.told) == told:
                break
        else:
            pytest.fail("what is spread stays where it is")
        assert sorted(fleet.loads().values()) == [7, 8, 8, 8]

    run(scene, server)


def test_an_orderly_end_hands_over_at_once(server: RedisServer) -> None:
    async def scene(fleet: Fleet) -> None:
        pods = pod_names(6)
        fleet.add("a", pods, ttl_s=30.0)
        await fleet.until_spread(6, 6)
        await fleet.stop("a")
        assert fleet.following == {}
        began_s = time.monotonic()
        fleet.add("b", pods, ttl_s=30.0)
        await fleet.until_spread(6, 6)
        assert time.monotonic() - began_s < 10, "nobody waits for the ttl of one that left"

    run(scene, server)


def test_killed_without_a_word(server: RedisServer) -> None:
    async def scene(fleet: Fleet) -> None:
        pods = pod_names(9)
        for name in ("a", "b", "c"):
            fleet.add(name, pods)
        await fleet.until_spread(9, 3, 3, 3)
        epochs = {pod: fleet.replicas["a"].epoch(pod) for pod in fleet.replicas["a"].held()}
        began_s = time.monotonic()
        await fleet.kill("a")
        await fleet.until_spread(9, 5, 4)
        assert time.monotonic() - began_s >= TTL_S / 2, "its ttl was not over yet"
        for pod, before in epochs.items():
            epoch = fleet.replicas[fleet.following[pod]].epoch(pod)
            assert before is not None
            assert epoch is not None
            assert epoch > before

    run(scene, server)


def test_cut_off_a_holder_stops_before_another_begins(server: RedisServer) -> None:
    """The listener asserts that nobody else would append at the instant of every lease taken."""

    async def scene(fleet: Fleet) -> None:
        pods = pod_names(4)
        with proxied(server.port) as proxy:
            fleet.add("a", pods, port=proxy.port)
            await fleet.until_spread(4, 4)
            fleet.add("b", pods)
            await fleet.until_spread(4, 2, 2)
            proxy.set("hold")
            await fleet.until(lambda: fleet.loads() == {"b": 4}, "b has all")
            last_lost = max(i for i, told in enumerate(fleet.told) if told[:2] == ("a", "lost"))
            first_taken = min(i for i, told in enumerate(fleet.told) if i > last_lost and told[0] == "b")
            assert last_lost < first_taken
            assert fleet.replicas["a"].counters()["exchanges_failed"] > 0
            assert fleet.replicas["a"].held() == {}
            proxy.set("pass")
            await fleet.until_spread(4, 2, 2)
            await fleet.stop("a")

    run(scene, server)


def test_one_that_slept_notices_before_it_appends(server: RedisServer) -> None:
    """The loop of the holder stands still past its ttl: no timer has run yet, and still it holds nothing."""

    async def scene(fleet: Fleet) -> None:
        slept_s = 0.0
        leases = fleet.add("a", pod_names(1), clock=lambda: time.monotonic() + slept_s)
        await fleet.until_spread(1, 1)
        assert leases.epoch("pod-0") is not None
        slept_s = TTL_S * (1 - MARGIN)
        assert leases.epoch("pod-0") is None
        assert leases.held() == {}
        await fleet.until(lambda: leases.epoch("pod-0") is not None, "it holds again")

    run(scene, server)


def test_a_lease_counts_from_the_question_and_not_from_its_late_answer(server: RedisServer) -> None:
    """Redis has given it for a ttl from when it was asked: whoever waits for the answer may have less than half of it."""

    async def scene(fleet: Fleet) -> None:
        late = Late(0.4 * LONG_TTL_S)
        leases = fleet.add("a", pod_names(1), late=late, ttl_s=LONG_TTL_S)
        await fleet.until_spread(1, 1)
        asked_s = late.asked_s[key_of(partition_of("pod-0"), "leases")]
        late.now_s = asked_s + (1 - MARGIN) * LONG_TTL_S - 0.001
        assert leases.epoch("pod-0") is not None
        late.now_s += 0.001
        assert leases.epoch("pod-0") is None
        assert leases.held() == {}

    run(scene, server)


def test_a_lease_that_was_given_up_does_not_come_back(server: RedisServer) -> None:
    async def scene(fleet: Fleet) -> None:
        leases = fleet.add("a", pod_names(2), ttl_s=LONG_TTL_S)
        await fleet.until_spread(2, 2)
        epoch = leases.epoch("pod-0")
        assert epoch is not None
        leases.give_up("pod-0", epoch - 1)
        assert leases.epoch("pod-0") == epoch, "that one is over long ago"
        leases.give_up("pod-0", epoch)
        assert leases.epoch("pod-0") is None
        await fleet.until_spread(2, 2)
        taken = [told[3] for told in fleet.told if told[1:3] == ("taken", "pod-0")]
        assert taken[0] == epoch
        assert taken[1:] == [leases.epoch("pod-0")]
        assert taken[1] > epoch, "another one, as it was of no use"
        assert leases.counters()["lost"] == 0
        assert leases.counters()["taken"] == 3

    run(scene, server)


def test_a_frozen_redis_gives_nothing_away_and_takes_nothing(server: RedisServer) -> None:
    async def scene(fleet: Fleet) -> None:
        pods = pod_names(4)
        for name in ("a", "b"):
            fleet.add(name, pods)
        await fleet.until_spread(4, 2, 2)
        with server.frozen():
            await fleet.until(lambda: fleet.following == {}, "nobody follows")
        await fleet.until_spread(4, 2, 2)

    run(scene, server)


def test_stolen_in_redis_is_noticed(server: RedisServer) -> None:
    async def scene(fleet: Fleet) -> None:
        leases = fleet.add("a", pod_names(1))
        await fleet.until_spread(1, 1)
        epoch = leases.epoch("pod-0")
        assert epoch is not None
        partition = partition_of("pod-0")
        with redis.Redis(port=server.port) as client:  # as a copy that took over without our last writes
            client.hset(key_of(partition, "leases"), "pod-0", f"{epoch + 1} thief -")
            client.hset(key_of(partition, "replicas"), "#change", epoch + 1)
        await fleet.until(lambda: fleet.following == {}, "it is lost")
        assert leases.holder("pod-0") == "thief"
        assert leases.counters()["lost"] == 1

    run(scene, server)


@pytest.mark.parametrize("kept", [True, False])
def test_redis_killed_and_back(kept: bool) -> None:
    """With its data and without: epochs go on rising, and whoever held holds again."""

    async def scene(server: RedisServer) -> None:
        async with fleet_of(server.port) as fleet:
            pods = pod_names(6)
            for name in ("a", "b"):
                fleet.add(name, pods)
            await fleet.until_spread(6, 3, 3)
            epochs = {pod: fleet.replicas[holder].epoch(pod) for pod, holder in fleet.following.items()}
            server.kill()
            await fleet.until(lambda: fleet.following == {}, "nobody follows")
            server.start()
            await fleet.until_spread(6, 3, 3)
            for pod, before in epochs.items():
                epoch = fleet.replicas[fleet.following[pod]].epoch(pod)
                assert before is not None
                assert epoch is not None
                assert epoch > before

    with serving_redis(keep=kept) as server:
        asyncio.run(scene(server))


def test_pods_come_and_go(server: RedisServer) -> None:
    async def scene(fleet: Fleet) -> None:
        pods = pod_names(2)
        first, second = fleet.add("a", pods), fleet.add("b", pods)
        await fleet.until_spread(2, 1, 1)
        odd = PodSpec("p\udc80 d-\u00e9", "m", zmq_endpoint="tcp://127.0.0.1:1")
        for leases in (first, second):
            leases.pod_added(odd)
            leases.pod_added(PodSpec("posts", "m"))
        await fleet.until(lambda: odd.name in fleet.following, "the new one is followed")
        assert first.epoch("posts") is None
        holder = fleet.replicas[fleet.following[odd.name]]
        before = holder.epoch(odd.name)
        holder.pod_removed(odd.name)
        assert holder.epoch(odd.name) is None
        holder.pod_added(odd)  # as registered anew, before its lease was released
        await fleet.until(lambda: odd.name in fleet.following, "followed again")
        again = fleet.replicas[fleet.following[odd.name]].epoch(odd.name)
        assert before is not None
        assert again is not None
        assert again >= before
        for leases in (first, second):
            leases.pod_removed(odd.name)
            leases.pod_removed("never")
        await fleet.until(lambda: first.holder(odd.name) is second.holder(odd.name) is None, "released")
        with redis.Redis(port=server.port) as client:
            left = sum(client.hlen(key_of(p, "leases")) for p in range(PARTITIONS))
        assert left == 2

    run(scene, server)


def test_a_pod_that_one_replica_does_not_know(server: RedisServer) -> None:
    """Its share would be with the one that cannot have it: after a ttl the other takes it all the same."""

    async def scene(fleet: Fleet) -> None:
        fleet.add("b", [])
        await fleet.until(lambda: fleet.exchanges()["b"] >= PARTITIONS, "b is there")
        fleet.add("a", pod_names(6))
        await fleet.until_spread(6, 6)

    run(scene, server)


def test_a_server_clock_that_was_set_back(server: RedisServer) -> None:
    """A deadline in the far future is brought back within the ttl: a dead replica's leases move on all the same."""

    async def scene(fleet: Fleet) -> None:
        fleet.add("a", pod_names(3))
        await fleet.until_spread(3, 3)
        await fleet.kill("a")
        with redis.Redis(port=server.port) as client:
            for partition in range(PARTITIONS):
                late_ms = int(time.time() * 1_000) + 3_600_000
                client.hset(key_of(partition, "replicas"), "a", f"{late_ms} {int(TTL_S * 1_000)}")
        fleet.add("b", pod_names(3))
        await fleet.until_spread(3, 3)

    run(scene, server)


def test_more_than_one_exchange_can_say(server: RedisServer) -> None:
    async def scene(fleet: Fleet) -> None:
        pods = pod_names(2_500)
        fleet.add("a", pods, ttl_s=5.0)
        await fleet.until_spread(2_500, 2_500)
        fleet.add("b", pods, ttl_s=5.0)
        await fleet.until_spread(2_500, 1_250, 1_250)

    run(scene, server)


def test_in_a_cluster() -> None:
    """One node that has all slots refuses keys of two slots in one script just as many nodes do."""

    async def scene(server: RedisServer) -> None:
        with redis.Redis(port=server.port) as client:
            client.execute_command("CLUSTER", "ADDSLOTS", *range(16_384))
            deadline_s = time.monotonic() + DEADLINE_S
            while "cluster_state:ok" not in str(client.execute_command("CLUSTER", "INFO")):
                assert time.monotonic() < deadline_s, "the cluster is up"
                await asyncio.sleep(0.01)
        async with redis.asyncio.RedisCluster(host="127.0.0.1", port=server.port) as client:
            fleet = Fleet(server.port)
            leases = Leases(
                client,
                _Listener(fleet, "a"),
                replica="a",
                partitions=PARTITIONS,
                partition_of=partition_of,
                key_of=key_of,
                ttl_s=TTL_S,
            )
            fleet.replicas["a"] = leases
            for pod in pod_names(6):
                leases.pod_added(PodSpec(pod, "m", zmq_endpoint="tcp://127.0.0.1:1"))
            leases.start()
            await fleet.until_spread(6, 6)
            await leases.stop()

    with serving_redis(options=cluster_options()) as server:
        asyncio.run(scene(server))
