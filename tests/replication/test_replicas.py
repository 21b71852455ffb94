"""Indexers as processes of their own, over a real Redis: what one of them accepts, all of them know."""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.replication.redis_server import RedisServer
from tests.serving.test_serving import serving

DEADLINE_S = 30.0


@contextlib.contextmanager
def replicas(url: str, count: int, *arguments: str, **settings: str) -> Iterator[list[httpx.Client]]:
    with contextlib.ExitStack() as stack:
        clients = []
        for number in range(count):
            _, port = stack.enter_context(
                serving(
                    "serve",
                    "--port",
                    "0",
                    *arguments,
                    KVINDEXER_REDIS_URL=url,
                    KVINDEXER_REPLICA_ID=f"replica-{number}",
                    **settings,
                )
            )
            base = f"http://127.0.0.1:{port}"
            clients.append(stack.enter_context(httpx.Client(base_url=base, timeout=DEADLINE_S)))
        yield clients


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def is_ready(http: httpx.Client) -> bool:
    return http.get("/readyz").status_code == 200


def stats(http: httpx.Client) -> dict[str, Any]:
    found = http.get("/v1/stats").json()
    assert isinstance(found, dict)
    return found


def figure(http: httpx.Client, name: str) -> float:
    """A metric without labels."""
    (line,) = re.findall(rf"^kvindexer_{name} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    return float(line)


def agree(clients: list[httpx.Client]) -> bool:
    """Equal digests at equal positions."""
    found = [stats(http) for http in clients]
    first = found[0]
    return all(
        (one["digest"], one["replication"]["positions"], one["replication"]["log"])
        == (first["digest"], first["replication"]["positions"], first["replication"]["log"])
        for one in found
    )


def stored(names: list[int], parent: int | None = None) -> dict[str, Any]:
    """Blocks of four tokens; a block's name says what is in it."""
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": [name for name in names for _ in range(4)],
        "block_size": 4,
    }


def post(http: httpx.Client, pod: str, *events: dict[str, Any], **more: Any) -> dict[str, Any]:
    body = {"pod": pod, "model": "m", "events": list(events), **more}
    answer = http.post("/v1/events", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert isinstance(found, dict)
    return found


def depths(http: httpx.Client, *names: int) -> dict[str, int]:
    asked = {"model": "m", "token_ids": [name for name in names for _ in range(4)]}
    rows = http.post("/v1/match", json=asked).json()["matches"]
    return {row["pod"]: row["matched_blocks"] for row in rows}


def test_what_one_replica_accepts_the_other_knows(redis_server: RedisServer) -> None:
    with replicas(redis_server.url, 2) as (one, other):
        wait_until(lambda: is_ready(one) and is_ready(other), "both are ready with an empty log")
        assert post(one, "a", stored([1, 2]), seq=0)["stored_blocks"] == 2
        assert depths(one, 1, 2, 3) == {"a": 2}, "a match sees it when the post is answered"
        wait_until(lambda: agree([one, other]), "the other replica applies it")
        assert post(other, "a", stored([3], 2), seq=1)["stored_blocks"] == 1
        assert depths(other, 1, 2, 3) == {"a": 3}
        assert post(other, "a", stored([3], 2), seq=1)["duplicate"]
        wait_until(lambda: agree([one, other]), "the first replica applies it")
        assert depths(one, 1, 2, 3) == {"a": 3}
        assert stats(one)["totals"] == stats(other)["totals"]
        assert stats(one)["replication"]["hashed_blocks"] == 2
        assert stats(other)["replication"]["raw_blocks"] == 0, "its parent is known: no tokens in the log"


def test_every_way_to_change_something(redis_server: RedisServer) -> None:
    with replicas(redis_server.url, 2) as (one, other):
        spec = {"model": "m", "block_size": 4}
        assert one.put("/v1/pods/a", json=spec).status_code == 200
        wait_until(lambda: other.get("/v1/pods/a").status_code == 200, "the pod is known everywhere")
        post(other, "a", stored([1, 2]))
        post(other, "b", stored([1, 2]))
        post(one, "c", stored([1]), dp_rank=1)
        everywhere = {"pod": None, "model": "m", "events": [{"type": "BlockRemoved", "block_hashes": [2]}]}
        wait_until(lambda: agree([one, other]), "quiet")
        assert one.post("/v1/events", json=everywhere).json()["removed_blocks"] == 2
        assert depths(one, 1, 2) == {"a": 1, "b": 1, "c": 1}
        assert other.delete("/v1/pods/c/blocks").json() == {"removed_blocks": 1}
        assert one.delete("/v1/pods/b").status_code == 204
        wait_until(lambda: agree([one, other]), "quiet again")
        assert depths(one, 1, 2) == depths(other, 1, 2) == {"a": 1}
        mooncake = {
            "endpoint": "tcp://127.0.0.1:1",
            "modelname": "m",
            "instance_id": "i",
            "block_size": 4,
            "dp_rank": 0,
            "type": "vLLM",
        }
        assert other.post("/register", json=mooncake).status_code in (200, 201)
        wait_until(lambda: agree([one, other]), "the instance is known everywhere")
        assert len(one.get("/workers").json()) == len(other.get("/workers").json()) == 3
        said = {"modelname": "m", "instance_id": "i", "dp_rank": 0, "type": "vLLM"}
        assert one.post("/unregister", json=said).status_code == 200
        wait_until(lambda: len(other.get("/workers").json()) == 2, "and gone everywhere")


def owners(http: httpx.Client) -> dict[str, int]:
    return {row["owner"]: row["blocks"] for row in http.get("/v1/owners").json()["owners"]}


def test_owners_are_known_everywhere(redis_server: RedisServer) -> None:
    with replicas(redis_server.url, 2) as (one, other):
        wait_until(lambda: is_ready(one) and is_ready(other), "both are ready with an empty log")
        post(one, "a", stored([1, 2]), owner="agent1:system")
        post(other, "b", stored([1]), owner="agent2")
        wait_until(lambda: agree([one, other]), "quiet")
        asked = {"model": "m", "token_ids": [1] * 4 + [2] * 4, "exclude": ["agent1"]}
        for http in (one, other):
            assert owners(http) == {"agent1:system": 2, "agent2": 1}
            [block] = http.post("/v1/fuzzy-match", json=asked).json()["blocks"]
            assert [(match["pod"], match["owners"]) for match in block["matches"]] == [("b", ["agent2"])]
        assert other.delete("/v1/owners/agent1").json() == {
            "owners": [{"owner": "agent1:system", "blocks": 2}]
        }
        wait_until(lambda: owners(one) == owners(other) == {"agent2": 1}, "cleared everywhere")
        assert one.delete("/v1/owners/agent1").status_code == 404


def test_what_is_refused_is_not_logged(redis_server: RedisServer) -> None:
    with replicas(redis_server.url, 1) as (one,):
        post(one, "a", stored([1]))
        before = stats(one)["replication"]["appended_groups"]
        answers = [
            one.post("/v1/events", json={"pod": "new", "events": [stored([1])]}),
            one.post("/v1/events", json={"pod": "a", "model": "other", "events": [stored([1])]}),
            one.post("/v1/events", json={"pod": "a", "events": [{"type": "BlockStored"}]}),
            one.delete("/v1/pods/nobody"),
            one.put("/v1/pods/a", json={"model": ""}),
        ]
        assert [answer.status_code for answer in answers] == [422, 422, 422, 404, 422]
        assert stats(one)["replication"]["appended_groups"] == before


def test_configured_pods_are_registered_once(redis_server: RedisServer) -> None:
    with replicas(redis_server.url, 2, "--pod", "a=,model=m,block_size=4") as clients:
        wait_until(lambda: all(is_ready(http) for http in clients), "ready means that the pods are there")
        assert [len(http.get("/v1/pods").json()["pods"]) for http in clients] == [1, 1]


def test_a_late_replica_reads_all_that_there_is(redis_server: RedisServer) -> None:
    with replicas(redis_server.url, 1) as (one,):
        for number in range(200):
            post(one, f"pod-{number % 7}", stored([number, 1_000 + number]))
        with replicas(redis_server.url, 1) as (late,):
            wait_until(lambda: is_ready(late), "ready means that the log was read to its end")
            assert agree([one, late])


def test_three_replicas_under_load_agree(redis_server: RedisServer) -> None:
    random_ = random.Random(7)
    with replicas(redis_server.url, 3) as clients:
        ends: dict[str, list[int]] = {}
        for number in range(400):
            pod = f"pod-{random_.randrange(5)}"
            chain = ends.setdefault(pod, [])
            names = [10 * number + i for i in range(random_.randint(1, 4))]
            parent = chain[-1] if chain and random_.random() < 0.8 else None
            post(random_.choice(clients), pod, stored(names, parent))
            chain.extend(names)
        wait_until(lambda: agree(clients), "quiet")
        assert stats(clients[0])["totals"] == stats(clients[1])["totals"] == stats(clients[2])["totals"]
        assert stats(clients[0])["totals"]["stored_blocks"] == sum(map(len, ends.values()))


@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_both_ways_of_a_post_wait_for_the_log(redis_server: RedisServer, form: str) -> None:
    """The short way in front of the framework, and the routes behind it (an Accept that only they understand)."""
    accept = {"accept": "application/json" if form == "json" else "application/msgpack"}
    with replicas(redis_server.url, 2) as (one, other):
        body = {"pod": "a", "model": "m", "events": [stored([1, 2])]}
        assert one.post("/v1/events", json=body, headers=accept).status_code == 200
        assert depths(one, 1, 2) == {"a": 2}
        wait_until(lambda: depths(other, 1, 2) == {"a": 2}, "the other replica has it")
