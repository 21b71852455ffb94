"""Redis that goes away and comes back: what is answered meanwhile, and that nothing is lost or doubled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.replication.proxy import proxied
from tests.replication.redis_server import RedisServer
from tests.replication.test_followed import fleet
from tests.replication.test_replicas import (
    agree,
    depths,
    figure,
    is_ready,
    post,
    replicas,
    stats,
    stored,
    wait_until,
)

HASTY = {"KVINDEXER_REDIS_TIMEOUT_S": "0.5", "KVINDEXER_REDIS_ANSWER_TIMEOUT_S": "0.5"}


@pytest.fixture
def keeping_server(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with RedisServer(folder, keep=True) as server:
        yield server


def states(http: httpx.Client, *names: int) -> dict[str, str]:
    asked = {"model": "m", "token_ids": [name for name in names for _ in range(4)]}
    return {row["pod"]: row["state"] for row in http.post("/v1/match", json=asked).json()["matches"]}


def try_post(http: httpx.Client, pod: str, *events: dict[str, Any], **more: Any) -> tuple[int, str]:
    answer = http.post("/v1/events", json={"pod": pod, "model": "m", "events": list(events), **more})
    return answer.status_code, answer.json().get("type", "")


def test_redis_is_killed_and_comes_back_with_its_data(keeping_server: RedisServer) -> None:
    with replicas(keeping_server.url, 2, **HASTY) as (one, other):
        wait_until(lambda: is_ready(one) and is_ready(other), "both read the log")
        post(one, "a", stored([1, 2]), seq=0)
        wait_until(lambda: agree([one, other]), "quiet")
        keeping_server.kill()
        wait_until(lambda: states(one, 1, 2) == {"a": "degraded"}, "rows say that news do not come through")
        wait_until(lambda: states(other, 1, 2) == {"a": "degraded"}, "on every replica")
        assert depths(one, 1, 2) == depths(other, 1, 2) == {"a": 2}, "matches go on from memory"
        cause = one.get("/v1/pods/a").json()["ranks"][0]["cause"]
        assert "the log is away" in cause
        assert try_post(one, "a", stored([3], 2), seq=1) == (503, "urn:kvindexer:problem:log-away")
        assert is_ready(one), "all replicas would leave at once"
        assert stats(one)["replication"]["away_s"] > 0
        keeping_server.start()
        wait_until(lambda: states(one, 1, 2) == {"a": "live"}, "as before")
        code, _ = try_post(one, "a", stored([3], 2), seq=1)
        assert code == 200, "whether the first try had been sent or not, it is in the log once"
        wait_until(lambda: agree([one, other]), "quiet again")
        assert depths(other, 1, 2, 3) == {"a": 3}
        assert stats(one)["totals"]["stored_blocks"] == stats(other)["totals"]["stored_blocks"] == 3


@pytest.mark.parametrize("mode", ["drop", "refuse"])
def test_one_replica_is_cut_off_and_heals(redis_server: RedisServer, mode: str) -> None:
    with (
        proxied(redis_server.port) as proxy,
        replicas(redis_server.url, 1, **HASTY) as (one,),
        replicas(f"redis://127.0.0.1:{proxy.port}/0", 1, **HASTY) as (cut,),
    ):
        wait_until(lambda: is_ready(one) and is_ready(cut), "both read the log")
        post(one, "a", stored([1, 2]), seq=0)
        wait_until(lambda: agree([one, cut]), "quiet")
        proxy.set(mode)
        for number in range(50):
            post(one, "a", stored([100 + number], 2), seq=1 + number)
        assert depths(one, 1, 2, 149) == {"a": 3}, "the others go on"
        wait_until(lambda: states(cut, 1, 2) == {"a": "degraded"}, "the one that is cut off says so")
        assert depths(cut, 1, 2, 149) == {"a": 2}, "and answers from memory"
        code, problem = try_post(cut, "b", stored([1]), seq=0)
        assert (code, problem) == (503, "urn:kvindexer:problem:log-away")
        proxy.set("pass")
        wait_until(lambda: states(cut, 1, 2)["a"] == "live", "it heals by itself")
        assert try_post(cut, "b", stored([1]), seq=0)[0] == 200
        wait_until(lambda: agree([one, cut]), "and has missed nothing")
        assert depths(cut, 1, 2, 149) == {"a": 3, "b": 1}
        assert stats(cut)["totals"]["stored_blocks"] == stats(one)["totals"]["stored_blocks"] == 53


def test_the_outbox_is_bounded(redis_server: RedisServer) -> None:
    small = {**HASTY, "KVINDEXER_REDIS_OUTBOX_BYTES_MAX": "1024", "KVINDEXER_REDIS_ANSWER_TIMEOUT_S": "0.1"}
    with (
        proxied(redis_server.port) as proxy,
        replicas(f"redis://127.0.0.1:{proxy.port}/0", 1, **small) as (one,),
    ):
        wait_until(lambda: is_ready(one), "it reads the log")
        proxy.set("refuse")
        answer = one.post("/v1/events", json={"pod": "a", "model": "m", "events": [stored(list(range(500)))]})
        assert answer.status_code == 503
        assert "redis_outbox_bytes_max" in answer.json()["detail"]
        assert answer.headers["retry-after"] == "1"
        assert stats(one)["replication"]["outbox_bytes"] == 0
        assert stats(one)["replication"]["outbox_refused"] == 1


def test_followed_streams_wait_for_room_in_the_outbox(redis_server: RedisServer) -> None:
    """What an engine tells cannot be refused: it is not read on, and nothing of it is lost."""
    with (
        proxied(redis_server.port) as proxy,
        fleet(f"redis://127.0.0.1:{proxy.port}/0", 2) as all_,
    ):
        (one,) = all_.start(KVINDEXER_REDIS_OUTBOX_BYTES_MAX="4096", KVINDEXER_REDIS_LEASE_TTL_S="60")
        all_.publish(5)
        all_.until_exact()
        proxy.set("refuse")
        all_.publish(200)
        wait_until(
            lambda: figure(one.http, "zmq_queued_batches") > 100, "what has no room waits in the queue"
        )
        # A machine that is busy may have a queue before the outbox is full.
        wait_until(lambda: stats(one.http)["replication"]["outbox_bytes"] >= 4_096, "full")
        assert stats(one.http)["replication"]["outbox_bytes"] < 2 * 4_096, (
            "and no more than a batch beyond it"
        )
        proxy.set("pass")
        all_.until_exact()
        assert figure(one.http, "zmq_queued_batches") == 0
        assert all(len(publisher.batches) == 205 for publisher in all_.publishers.values())


def test_redis_may_come_after_the_replicas(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.kill()
    try:
        with replicas(server.url, 2, "--pod", "a=,model=m", **HASTY) as clients:
            for http in clients:
                answer = http.get("/readyz")
                assert answer.status_code == 503
                assert any(fault["field"].startswith("log.") for fault in answer.json()["errors"])
            server.start()
            wait_until(lambda: all(is_ready(http) for http in clients), "they find it by themselves")
            post(clients[0], "a", stored([1]))
            wait_until(lambda: agree(clients), "quiet")
            assert depths(clients[1], 1) == {"a": 1}
    finally:
        server.stop()
