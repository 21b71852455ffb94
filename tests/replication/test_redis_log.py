"""What a replica makes of the Redis that it is given: a URL that cannot be used is told without a word of it, since there
is a password in it; one that may lose the log to evictions is told too."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from redis.asyncio.cluster import RedisCluster

from app.errors import InvalidSettings, LogAway
from app.replication.redis_log import RedisLog
from tests.replication.redis_server import RedisServer
from tests.replication.variants import Cluster

SECRETS = ("s3cret", "4711", "hidden")


@pytest.mark.parametrize("cluster", [False, True], ids=["alone", "cluster"])
@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cret/hidden@host:6379/0",
        "redis://user:s3cret#hidden@host:6379/0",
        "rediss://user:s3cret?hidden@host:6379/0",
        "redis://:4711/hidden@host:6379/0",  # the port 4711 of this machine, for whoever does not look further
        "redis://user:4711#hidden@host:6379",
        "redis://user:4711?hidden@host:6379",
        "redis://:hidden@host:s3cret",
        "redis://:hidden@host:4711000",
        "redis://:hidden@[host:6379",
        "redis://:hidden@host:6379/0?socket_timeout=s3cret",
        "http://:hidden@host:6379/0",
        "s3cret",
    ],
)
def test_a_url_that_cannot_be_used_is_not_repeated(url: str, cluster: bool) -> None:
    with pytest.raises(InvalidSettings, match="cannot be used") as caught:
        RedisLog(url, cluster=cluster, namespace="test", timeout_s=1.0)
    assert caught.value.__context__ is None or caught.value.__suppress_context__, (
        "a traceback shows what the client says"
    )
    assert not any(secret in str(caught.value) for secret in SECRETS), str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://host:6379/0",
        "redis://:s3cret%2Fhid%40den@host:6379/0",
        "rediss://user:p@ss@host",
        "redis://host/0?password=p@ss/w@rd",
        "unix:///run/redis@one.sock?password=p@ss",
    ],
)
def test_a_url_that_can_be_used_is(url: str) -> None:
    RedisLog(url, cluster=False, namespace="test", timeout_s=1.0)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def connect(url: str, *, times: int = 1, cluster: bool = False) -> None:
    async def ask() -> None:
        log = RedisLog(url, cluster=cluster, namespace="test", timeout_s=5.0)
        try:
            for _ in range(times):
                await log.warn_of_evictions()
        finally:
            await log.close()

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("memory", "policy", "is_told"),
    [
        ("100mb", "allkeys-lru", True),
        ("100mb", "allkeys-random", True),
        ("0", "allkeys-lru", False),
        ("100mb", "noeviction", False),
        ("100mb", "volatile-lru", False),
    ],
)
def test_a_redis_that_may_evict_the_log_is_told_once(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, memory: str, policy: str, is_told: bool
) -> None:
    with redis_server.client() as client:
        client.config_set("maxmemory", memory)
        client.config_set("maxmemory-policy", policy)
    connect(redis_server.url, times=3)
    told = warnings(caplog)
    assert len(told) == is_told
    for line in told:
        assert f"its maxmemory-policy is {policy}; set maxmemory-policy noeviction" in line


def test_a_policy_that_changed_meanwhile_is_told_again(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        log = RedisLog(redis_server.url, cluster=False, namespace="test", timeout_s=5.0)
        with redis_server.client() as client:
            client.config_set("maxmemory", "100mb")
            for policy in ("allkeys-lru", "allkeys-lfu", "noeviction", "noeviction", "allkeys-lfu"):
                client.config_set("maxmemory-policy", policy)
                await log.warn_of_evictions()
        await log.close()

    asyncio.run(play())
    assert [line.partition("policy is ")[2].partition(";")[0] for line in warnings(caplog)] == [
        "allkeys-lru",
        "allkeys-lfu",
        "allkeys-lfu",
    ]


def test_who_may_not_ask_is_not_told(redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server.client() as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.execute_command("ACL", "SETUSER", "indexer", "on", ">secret", "~*", "+@all", "-info")
    connect(f"redis://indexer:secret@127.0.0.1:{redis_server.port}/0")
    assert warnings(caplog) == []


@pytest.mark.parametrize("count", [1, 3])
def test_every_node_of_a_cluster_is_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    """One of a single node is what services that are rented begin with."""
    cluster = Cluster(tmp_path, count)
    try:
        with cluster.nodes[-1].client() as client:
            client.config_set("maxmemory", "100mb")
            client.config_set("maxmemory-policy", "allkeys-lru")
        connect(cluster.url, cluster=True)
    finally:
        cluster.stop()
    (line,) = warnings(caplog)
    assert "its maxmemory-policy is allkeys-lru" in line


def test_a_redis_that_is_away_is_told_by_whoever_reads_it(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A node of a cluster that is away holds other partitions than those that are read on."""
    redis_server.stop()
    connect(redis_server.url)
    assert warnings(caplog) == []


@pytest.mark.parametrize("error", [RuntimeError("the handler is closed"), AttributeError("writelines")])
def test_a_connection_that_another_command_closed_is_a_log_that_is_away(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A cluster's client lets them through when a node goes; whoever reads must go on, and tries again."""

    async def fail(*_: object, **__: object) -> None:
        raise error

    async def play() -> None:
        log = RedisLog("redis://127.0.0.1:9/0", cluster=True, namespace="test", timeout_s=1.0)
        monkeypatch.setattr(RedisCluster, "execute_command", fail)
        with pytest.raises(LogAway, match=str(error)):
            await log.terms()
        monkeypatch.setattr(RedisCluster, "initialize", fail)
        await log.warn_of_evictions()

    asyncio.run(play())
