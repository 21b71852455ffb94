"""The log, the leases and the snapshots on Redis as operators run it: passwords, ACLs, TLS, a cluster of three nodes; and
nothing that Redis 6.2 does not know."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import redis.asyncio
from redis.asyncio.cluster import RedisCluster

from app.errors import LogAway
from app.pods import PodSpec
from app.replication.leases import Leases
from app.replication.redis_log import BEGINNING, RedisLog, Terms
from app.snapshots.redis_store import RedisStore
from tests.replication.redis_server import RedisServer
from tests.replication.test_replicas import agree, depths, is_ready, post, replicas, stats, stored, wait_until
from tests.replication.variants import Certificates, Cluster, TlsServer
from tests.snapshots.test_file import FRAMES, STATE

SECRET = "a-password-of-this-test"
DEADLINE_S = 30.0
PARTITIONS = 6
TERMS = Terms(log="1", version=1, partitions=PARTITIONS, fuzzy=False, count_copies=True)
# What a user of Redis must be allowed: see docs/operations.md.
RIGHTS = "~{kvindexer* -@all +@read +@write +@connection +@scripting +time +info"


@dataclasses.dataclass(frozen=True)
class Variant:
    url: str
    cluster: bool = False

    def client(self, **options: Any) -> Any:
        kind: Any = RedisCluster if self.cluster else redis.asyncio.Redis
        return kind.from_url(self.url, **options)


@pytest.fixture(params=["password", "user", "tls", "cluster"])
def variant(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Variant]:
    folder = tmp_path / "redis"
    folder.mkdir()
    server: RedisServer | Cluster
    if request.param == "tls":
        server = TlsServer(folder, Certificates(folder))
        made = Variant(server.url)
    elif request.param == "cluster":
        server = Cluster(folder)
        made = Variant(server.url, cluster=True)
    else:
        server = RedisServer(folder, password=SECRET)
        user = ""
        if request.param == "user":
            user = "indexer"
            with server.client() as client:
                client.execute_command("ACL", "SETUSER", user, "on", f">{SECRET}", *RIGHTS.split())
        made = Variant(f"redis://{user}:{SECRET}@127.0.0.1:{server.port}/0")
    try:
        yield made
    finally:
        server.stop()


class Listener:
    def __init__(self) -> None:
        self.taken: dict[str, int] = {}

    def lease_taken(self, pod: str, epoch: int) -> None:
        self.taken[pod] = epoch

    def lease_lost(self, pod: str) -> None:
        self.taken.pop(pod, None)


async def use_the_log(variant: Variant) -> None:
    log = RedisLog(variant.url, cluster=variant.cluster, namespace="kvindexer", timeout_s=5.0)
    assert await log.terms() is None
    assert await log.succeed(None, msgspec.structs.replace(TERMS, log="0"))
    assert not await log.succeed(None, TERMS)
    await log.stand("one", b"5")
    assert await log.candidates() == {"one": b"5"}
    await log.forget_candidates()
    assert await log.succeed(await log.terms(), TERMS)
    assert await log.terms() == TERMS
    log.number = TERMS.log
    assert abs(await log.now_s() - time.time()) < DEADLINE_S
    for partition in range(PARTITIONS):
        assert await log.first(partition) is None
        assert await log.last(partition) == BEGINNING
        assert (await log.read(partition, BEGINNING, wait=False))[0] == []
        positions = [await log.append(partition, f"{partition}-{n}".encode()) for n in range(3)]
        found, _ = await log.read(partition, BEGINNING, wait=True)
        assert found == [(position, f"{partition}-{n}".encode()) for n, position in enumerate(positions)]
        assert await log.read(partition, positions[-1], wait=partition == 0) == ([], True)
        assert await log.has(partition, positions[1])
        assert await log.trim(partition, positions[1]) == 1
        assert await log.first(partition) == positions[1]
        assert await log.last(partition) == positions[-1]
        assert await log.read(partition, positions[1], wait=False) == (found[2:], True)
        assert await log.trimmed(partition) == positions[1]
    await log.remove(TERMS.log, PARTITIONS)
    assert await log.first(0) is None
    await log.close()


async def use_leases(variant: Variant) -> None:
    listeners = [Listener(), Listener()]
    clients = [variant.client(), variant.client()]
    made = [
        Leases(
            client,
            listener,
            replica=f"r{number}",
            partitions=PARTITIONS,
            partition_of=lambda pod: int(pod) % PARTITIONS,
            key_of=lambda partition, what: f"{{kvindexer:{partition}}}:{what}",
            ttl_s=2.0,
        )
        for number, (client, listener) in enumerate(zip(clients, listeners, strict=True))
    ]
    pods = [str(number) for number in range(12)]

    async def until(shares: list[int]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while [len(listener.taken) for listener in listeners] != shares:
            assert time.monotonic() < deadline_s, [listener.taken for listener in listeners]
            await asyncio.sleep(0.01)

    for leases in made:
        for pod in pods:
            leases.pod_added(PodSpec(pod, "m", zmq_endpoint="tcp://127.0.0.1:1"))
    made[0].start()
    await until([12, 0])
    epochs = dict(listeners[0].taken)
    made[1].start()
    await until([6, 6])  # one is asked for what the other should have
    await made[0].stop()
    await until([len(listeners[0].taken), 12])
    assert all(listeners[1].taken[pod] > epochs[pod] for pod in pods)
    await made[1].stop()
    for client in clients:
        await client.aclose()


async def use_the_store(variant: Variant) -> None:
    client = variant.client()
    store = RedisStore(client, tag="{kvindexer}:snapshot")
    for at_s in (1.0, 2.0, 3.0):
        sink = await store.begin()
        assert sink is not None
        assert await store.begin() is None
        for frame in FRAMES:
            await sink.add(frame)
        await sink.finish(msgspec.structs.replace(STATE, at_s=at_s))
    given_up = await store.begin()
    assert given_up is not None
    await given_up.add(b"x" * (3 << 20))
    await given_up.discard()
    assert await store.names() == ["newest", "previous"]
    source = await store.open("newest")
    assert source.state.at_s == 3.0
    assert [frame async for frame in source.frames()] == FRAMES
    await client.aclose()


async def use_everything(variant: Variant) -> None:
    await use_the_log(variant)
    await use_leases(variant)
    await use_the_store(variant)


def test_everything_on_every_kind_of_redis(variant: Variant) -> None:
    asyncio.run(use_everything(variant))


def test_replicas_on_every_kind_of_redis(variant: Variant) -> None:
    more = {"KVINDEXER_REDIS_CLUSTER": "true"} if variant.cluster else {}
    with replicas(variant.url, 2, **more) as (one, other):
        wait_until(lambda: is_ready(one) and is_ready(other), "both have read the log")
        for number in range(12):  # on all partitions
            post(one if number % 2 else other, f"pod-{number}", stored([1, 2]))
        wait_until(lambda: agree([one, other]), "both have applied it")
        assert depths(one, 1, 2) == depths(other, 1, 2) == {f"pod-{number}": 2 for number in range(12)}


def test_a_cluster_that_is_away_at_the_start_and_later(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        for node in cluster.nodes:
            node.stop()
        with replicas(cluster.url, 1, KVINDEXER_REDIS_CLUSTER="true") as (one,):
            for number in range(2):
                wait_until(lambda: "Redis: " in stats(one)["replication"]["trouble"], "it says what is wrong")
                for node in cluster.nodes:
                    node.start()
                wait_until(lambda: not stats(one)["replication"]["trouble"] and is_ready(one), "it is found")
                post(one, f"pod-{number}", stored([1, 2]))
                for node in cluster.nodes:
                    node.kill()
            assert depths(one, 1, 2) == {"pod-0": 2, "pod-1": 2}
    finally:
        cluster.stop()


def test_a_lone_redis_that_is_called_a_cluster_is_told(redis_server: RedisServer) -> None:
    with replicas(redis_server.url, 1, KVINDEXER_REDIS_CLUSTER="true") as (one,):
        wait_until(lambda: "Redis: " in stats(one)["replication"]["trouble"], "it says what is wrong")
        assert "luster" in one.get("/readyz").json()["detail"]


def test_a_wrong_password_is_told_and_not_shown(tmp_path: Path) -> None:
    with RedisServer(tmp_path, password=SECRET) as server:
        url = f"redis://:wrong-{SECRET}@127.0.0.1:{server.port}/0"
        with replicas(url, 1) as (one,):
            wait_until(lambda: stats(one)["replication"]["trouble"], "it says what is wrong")
            said = one.get("/readyz")
            assert said.status_code == 503
            assert "password" in said.text
            assert SECRET not in said.text + one.get("/v1/stats").text


def test_a_server_that_nobody_vouches_for(tmp_path: Path) -> None:
    server = TlsServer(tmp_path, Certificates(tmp_path))

    async def ask(url: str) -> None:
        log = RedisLog(url, cluster=False, namespace="kvindexer", timeout_s=5.0)
        try:
            await log.terms()
        finally:
            await log.close()

    try:
        asyncio.run(ask(server.url))
        with pytest.raises(LogAway, match="certificate"):
            asyncio.run(ask(f"rediss://localhost:{server.port}/0"))
    finally:
        server.stop()


# -- Redis 6.2


def since(text: str | bytes) -> tuple[int, ...]:
    text = text.decode() if isinstance(text, bytes) else text
    return tuple(map(int, text.split(".")))


def words_since_6_2(arguments: list[dict[bytes, Any]], parent: bytes = b"1.0") -> set[str]:
    """Words of a command (KEEPTTL, NOMKSTREAM ...) that are newer than 6.2."""
    found: set[str] = set()
    for argument in arguments:
        when = argument.get(b"since", parent)
        if b"token" in argument and since(when) > (6, 2, 99):
            found.add(argument[b"token"].decode().upper())
        found |= words_since_6_2(argument.get(b"arguments", []), when)
    return found


def documented(server: RedisServer) -> dict[str, tuple[tuple[int, ...], set[str]]]:
    """Of every command, and of `COMMAND|SUBCOMMAND`: since when there is one, and its newer words."""
    found: dict[str, tuple[tuple[int, ...], set[str]]] = {}
    with redis.Redis(port=server.port, protocol=3) as client:
        if since(client.info("server")["redis_version"]) < (7,):
            pytest.skip("this Redis does not list its commands; it is itself what the list is for")
        client.set_response_callback("COMMAND", lambda answer, **_: answer)
        listed: dict[bytes, dict[bytes, Any]] = client.execute_command("COMMAND", "DOCS")
    for name, about in listed.items():
        for known, fields in {name: about, **about.get(b"subcommands", {})}.items():
            newer = words_since_6_2(fields.get(b"arguments", []))
            found[known.decode().upper()] = (since(fields[b"since"]), newer)
    return found


def test_nothing_that_redis_6_2_does_not_know(redis_server: RedisServer) -> None:
    """Everything that the log, the leases and the store send, scripts included, as MONITOR sees it."""
    known = documented(redis_server)
    assert known["EXPIRETIME"][0] == (7, 0, 0), "the list tells what is new"
    assert "GT" in known["EXPIRE"][1]
    seen: list[str] = []
    with redis_server.client() as watching, watching.monitor() as monitor:
        asyncio.run(use_everything(Variant(redis_server.url)))
        with redis_server.client() as client:
            client.execute_command("ECHO", "that-is-all")
        for entry in monitor.listen():
            if "that-is-all" in entry["command"]:
                break
            seen.append(entry["command"])
    # By which the client tells its name and goes on where a server does not know it.
    seen = [command for command in seen if not command.startswith("CLIENT SETINFO ")]
    used = {command.split(" ", 1)[0].upper() for command in seen}
    assert {"XADD", "XREAD", "XTRIM", "EVAL", "SET", "PERSIST", "HSET"} <= used, "and what scripts send"
    for command in seen:
        words = re.findall(r"[^\s\"]+", command.upper())
        whole = "|".join(words[:2])
        when, newer = known.get(whole) or known[words[0]]
        assert when <= (6, 2, 99), command
        assert not newer & set(words[1:]), command
