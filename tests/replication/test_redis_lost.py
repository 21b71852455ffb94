"""What Redis may do to the log: come back with its data, without it, with a part of it, or trim it; and a way to it that
is cut. Each time all replicas end with the picture of a lone process fed with the same batches, or say what they cannot
know."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest

from app.replication.redis_log import order
from tests.replication.proxy import proxied
from tests.replication.redis_server import RedisServer
from tests.replication.test_followed import fleet
from tests.replication.test_replicas import (
    agree,
    depths,
    figure,
    is_ready,
    owners,
    post,
    stats,
    stored,
    wait_until,
)


def replication(http: object) -> dict[str, int]:
    found = stats(http)["replication"]  # type: ignore[arg-type]
    assert isinstance(found, dict)
    return found


def rank_of(http: httpx.Client, pod: str) -> dict[str, str]:
    found = http.get(f"/v1/pods/{pod}").json()["ranks"][0]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("keep", [True, False], ids=["with its data", "without its data"])
def test_redis_is_killed_under_load(tmp_path: Path, keep: bool) -> None:
    with RedisServer(tmp_path, keep=keep) as server, fleet(server.url, 4) as all_:
        all_.start(2)
        all_.publish(10)
        all_.until_exact()
        before = replication(all_.clients[0])["log"]
        for number in range(20):
            all_.publish(5)
            if number == 10:
                server.kill()
            if number == 15:
                server.start()
        all_.until_exact()
        assert (replication(all_.clients[0])["log"] == before) == keep
        begun = [replication(http)["logs_begun"] for http in all_.clients]
        assert sorted(begun) == ([0, 0] if keep else [0, 1]), "one of them made the new log"
        all_.publish(5)
        all_.start()
        all_.until_exact()
        wait_until(lambda: agree(all_.clients), "a new one finds all of it")


def test_what_was_posted_survives_a_redis_without_its_data(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, fleet(server.url, 0) as all_:
        all_.start(3)
        wait_until(lambda: all(map(is_ready, all_.clients)), "ready")
        post(all_.clients[0], "counted", stored([1, 2]), seq=0)
        post(all_.clients[1], "uncounted", stored([1, 2]))
        wait_until(lambda: agree(all_.clients), "quiet")
        before = replication(all_.clients[0])["log"]
        server.kill()
        server.start()
        wait_until(
            lambda: all(replication(http)["log"] not in ("", before) for http in all_.clients),
            "a new log",
        )
        wait_until(lambda: all(map(is_ready, all_.clients)) and agree(all_.clients), "ready again")
        all_.start()
        wait_until(lambda: is_ready(all_.clients[-1]), "a new one is ready")
        for http in all_.clients:
            assert depths(http, 1, 2) == {"counted": 2, "uncounted": 2}
            ranks = {pod: http.get(f"/v1/pods/{pod}").json()["ranks"][0] for pod in ("counted", "uncounted")}
            assert ranks["counted"]["state"] == "live", "its next number shows whether something is missing"
            assert ranks["uncounted"]["state"] == "degraded", "nobody can tell"
            assert "Redis lost" in ranks["uncounted"]["cause"]
        assert post(all_.clients[2], "counted", stored([3], 2), seq=1)["stored_blocks"] == 1
        wait_until(lambda: agree(all_.clients), "quiet again")
        assert all(depths(http, 1, 2, 3)["counted"] == 3 for http in all_.clients)


def test_everything_is_flushed_while_replicas_stay_connected(redis_server: RedisServer) -> None:
    """No connection breaks: the keys are gone, with the log, the snapshots and the leases."""
    with fleet(redis_server.url, 4) as all_:
        all_.start(3)
        all_.publish(10)
        all_.until_exact()
        all_.until_shared()
        all_.post(all_.clients[0], "counted", stored([5_000_001]))
        post(all_.clients[1], "uncounted", stored([5_000_001]))
        wait_until(lambda: agree(all_.clients), "quiet")
        before = str(replication(all_.clients[0])["log"])
        doubting: set[int] = set()
        ready: list[int] = []

        def have_another_log() -> bool:
            states = [rank_of(http, "counted")["state"] for http in all_.clients]
            doubting.update(number for number, state in enumerate(states) if state == "degraded")
            ready.append(sum(map(is_ready, all_.clients)))
            logs = [str(replication(http)["log"]) for http in all_.clients]
            return before not in logs and len(set(logs)) == 1 and "" not in logs

        with redis_server.client() as client:
            client.flushall()
        all_.publish(5)
        wait_until(have_another_log, "a new log")
        assert doubting == {0, 1, 2}, "meanwhile nobody passes its rows off as up to date"
        assert min(ready) > 0, "and there is always one to be asked"
        wait_until(lambda: all(map(is_ready, all_.clients)) and agree(all_.clients), "ready again")
        assert sorted(replication(http)["logs_begun"] for http in all_.clients) == [0, 0, 1]
        for http in all_.clients:
            assert depths(http, 5_000_001) == {"counted": 1, "uncounted": 1}, "nothing that was known is lost"
            assert rank_of(http, "counted")["state"] == "live"
            assert "Redis lost" in rank_of(http, "uncounted")["cause"]
        assert all_.clients[0].delete("/v1/pods/uncounted").status_code == 204, (
            "the reference has numbers only"
        )
        all_.publish(5)
        all_.post(all_.clients[2], "counted", stored([5_000_002], 5_000_001))
        all_.start()
        all_.until_exact()
        all_.until_shared()
        wait_until(lambda: agree(all_.clients), "a new one finds all of it")


def test_redis_loses_the_end_of_the_log(tmp_path: Path) -> None:
    folder, copy = tmp_path / "redis", tmp_path / "copy"
    folder.mkdir()
    with RedisServer(folder, keep=True) as server, fleet(server.url, 2) as all_:
        all_.start(2)
        all_.publish(10)
        all_.until_exact()
        all_.post(all_.clients[0], "posted", stored([5_000_001]))
        wait_until(lambda: agree(all_.clients), "quiet")
        shutil.copytree(folder, copy)
        before = replication(all_.clients[0])["log"]
        all_.publish(10)
        all_.post(all_.clients[0], "posted", stored([5_000_002], 5_000_001))
        all_.until_exact()
        wait_until(lambda: agree(all_.clients), "quiet again")
        server.kill()
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)
        server.start()
        wait_until(
            lambda: all(replication(http)["log"] not in ("", before) for http in all_.clients),
            "a new log",
        )
        all_.start()
        wait_until(lambda: all(map(is_ready, all_.clients)) and agree(all_.clients), "ready again")
        all_.until_exact()
        for http in all_.clients:
            assert depths(http, 5_000_001, 5_000_002) == {"posted": 2}, "what the replicas had is not lost"
        all_.publish(5)
        all_.post(all_.clients[1], "posted", stored([5_000_003], 5_000_002))
        all_.until_exact()


def test_a_new_replica_begins_from_a_snapshot_and_the_log_is_trimmed(redis_server: RedisServer) -> None:
    with fleet(redis_server.url, 4) as all_:
        (one,) = all_.start()
        all_.publish(30)
        all_.until_exact()
        all_.post(one.http, "posted", stored([5_000_001, 5_000_002]), owner="agent1")

        def trimmed() -> bool:
            all_.publish(1)
            return replication(one.http)["trimmed_groups"] > 0

        wait_until(trimmed, "the log is trimmed behind the snapshots")
        (late,) = all_.start(KVINDEXER_SNAPSHOT_INTERVAL_S="4")
        all_.until_exact()
        assert replication(late.http)["snapshots_loaded"] == 1
        wait_until(
            lambda: figure(late.http, "snapshot_saved_at_seconds") > 0, "it knows of the others' snapshots"
        )
        assert figure(late.http, "snapshot_saved_total") == 0, "and had no need to write one"
        wait_until(lambda: agree(all_.clients), "they agree")
        assert owners(late.http) == {"agent1": 2}


def test_a_replica_that_was_trimmed_past_loads_the_snapshot(redis_server: RedisServer) -> None:
    with proxied(redis_server.port) as proxy, fleet(redis_server.url, 4) as all_:
        all_.start()
        # It never writes a snapshot: cut off in the middle of one, it would keep the others from it until its lock ends.
        (cut,) = all_.start(url=f"redis://127.0.0.1:{proxy.port}/0", KVINDEXER_SNAPSHOT_INTERVAL_S="3600")
        all_.publish(10)
        all_.until_exact()
        all_.until_shared()
        loaded = replication(cut.http)["snapshots_loaded"]
        proxy.set("drop")
        wait_until(lambda: not cut.leases, "it lets go of what it followed")

        def is_passed() -> bool:
            all_.publish(1)
            told = stats(cut.http)["replication"]
            with redis_server.client() as client:
                trimmed = client.hgetall(f"{{kvindexer}}:trimmed:{told['log']}")
            assert isinstance(trimmed, dict)
            return any(
                order(before.decode()) > order(told["positions"][int(partition)])
                for partition, before in trimmed.items()
            )

        wait_until(is_passed, "the log is trimmed past it while it is cut off")
        proxy.set("pass")
        all_.until_exact()
        assert replication(cut.http)["snapshots_loaded"] > loaded
        wait_until(lambda: agree(all_.clients), "they agree")
