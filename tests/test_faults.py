"""Faults that other indexers have, each as a user would meet it: real publishers, real posts, a process of its own.

docs/reliability.md lists them all, with the test of each; those that no other test shows are here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from app.ingest.vllm import Cleared, Removed, Stored, WireEvent, WireForm, encode_batch
from app.replay.indexer import own_indexer
from app.simulator.publisher import Publisher, PublisherSettings

DEADLINE_S = 30.0
BLOCK = 16
DISCONNECT_DEADLINE_S = 2


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    settings = {"zmq_disconnect_deadline_s": DISCONNECT_DEADLINE_S, "ttl_s": 0, "sweep_pause_s": 0}
    with own_indexer(**settings) as url, httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
        yield client


def prompt(blocks: int, *, first: int = 0) -> list[int]:
    return list(range(first, first + blocks * BLOCK))


def stored(names: range, *, parent: int | None = None, first: int = 0) -> Stored:
    return Stored(
        block_hashes=list(names),
        parent_block_hash=parent,
        token_ids=prompt(len(names), first=first),
        block_size=BLOCK,
    )


def payload(*events: WireEvent, ts: float = 1.0) -> bytes:
    return encode_batch(WireForm.MAPS_0_33, ts=ts, events=events)


def post(http: httpx.Client, pod: str, model: str, seq: int, *events: WireEvent) -> Any:
    return (
        http.post(
            "/v1/events",
            params={"pod": pod, "model": model, "seq": seq},
            content=payload(*events),
            headers={"content-type": "application/msgpack"},
        )
        .raise_for_status()
        .json()
    )


def rows(http: httpx.Client, model: str, tokens: list[int]) -> dict[str, Any]:
    answer = http.post("/v1/match", json={"model": model, "token_ids": tokens}).raise_for_status().json()
    return {row["pod"]: row for row in answer["matches"]}


def depths(http: httpx.Client, model: str, tokens: list[int]) -> dict[str, int]:
    return {pod: row["matched_blocks"] for pod, row in rows(http, model, tokens).items()}


def rank(http: httpx.Client, pod: str) -> Any:
    return http.get(f"/v1/pods/{pod}").raise_for_status().json()["ranks"][0]


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s, f"waited for {what}"
        time.sleep(0.01)


@contextlib.contextmanager
def followed(http: httpx.Client, pod: str, model: str, publisher: Publisher) -> Iterator[None]:
    spec = {
        "model": model,
        "zmq_endpoint": publisher.endpoint,
        "replay_endpoint": publisher.replay_endpoint,
    }
    http.put(f"/v1/pods/{pod}", json=spec).raise_for_status()
    try:
        yield
    finally:
        http.delete(f"/v1/pods/{pod}")


def test_one_event_of_256_blocks_is_one_prefix(http: httpx.Client) -> None:
    """Its blocks are chained to each other, and a block is so many tokens, not bytes."""
    with Publisher() as publisher, followed(http, "long-pod", "long", publisher):
        publisher.publish(0, payload(stored(range(1, 257))))
        wait_until(lambda: rank(http, "long-pod")["last_seq"] == 0, "the batch")
        (row,) = rows(http, "long", prompt(256)).values()
        assert (row["matched_blocks"], row["matched_tokens"], row["percent"]) == (256, 4_096, 100.0)
        assert depths(http, "long", prompt(255)) == {"long-pod": 255}
        assert depths(http, "long", [9, *prompt(256)]) == {}


def test_a_removal_is_of_its_own_pod(http: httpx.Client) -> None:
    for pod in ("mine", "yours"):
        post(http, pod, "removal", 0, stored(range(1, 5)))
    post(http, "mine", "removal", 1, Removed(block_hashes=[2, 3]))
    assert depths(http, "removal", prompt(4)) == {"mine": 1, "yours": 4}


def test_equal_engine_hashes_of_two_models(http: httpx.Client) -> None:
    """Names of blocks mean something within one pod only."""
    post(http, "pod-m1", "m1", 0, stored(range(1, 5)))
    post(http, "pod-m2", "m2", 0, stored(range(1, 5), first=1_000))
    post(http, "pod-m1", "m1", 1, Removed(block_hashes=[1, 2, 3, 4]))
    assert depths(http, "m1", prompt(4)) == {}
    assert depths(http, "m2", prompt(4, first=1_000)) == {"pod-m2": 4}
    assert depths(http, "m1", prompt(4, first=1_000)) == {}


def test_fifty_pods_that_share_a_prefix_are_all_told(http: httpx.Client) -> None:
    pods = {f"shared-{number}": 1 + number % 4 for number in range(50)}
    for pod, blocks in pods.items():
        post(http, pod, "shared", 0, stored(range(1, 1 + blocks)))
    assert depths(http, "shared", prompt(4)) == pods


def test_more_removals_than_blocks(http: httpx.Client) -> None:
    """No count goes below nothing, and a block that comes afterwards counts at once."""
    post(http, "counted", "counted", 0, stored(range(1, 3)))
    for seq in range(1, 4):
        post(http, "counted", "counted", seq, Removed(block_hashes=[2, 2, 77]))
    assert rank(http, "counted")["blocks"]["gpu"] == 1
    post(http, "counted", "counted", 4, stored(range(2, 3), parent=1, first=BLOCK))
    assert depths(http, "counted", prompt(2)) == {"counted": 2}
    assert rank(http, "counted")["blocks"]["gpu"] == 2


@pytest.mark.parametrize("way", ["removed", "cleared", "deleted"])
def test_nothing_is_left_of_what_is_gone(http: httpx.Client, way: str) -> None:
    """Neither entries nor the names of blocks: figures return to what they were, round after round."""

    def held() -> tuple[int, int]:
        index = http.get("/v1/stats").json()["index"]
        return index["prefixes"], index["engine_keys"]

    pod = f"gone-{way}"
    before = held()
    for seq in range(0, 20, 2):
        post(http, pod, "gone", seq, stored(range(seq * 500, seq * 500 + 500), first=seq))
        assert held()[1] >= before[1] + 500
        if way == "removed":
            post(http, pod, "gone", seq + 1, Removed(block_hashes=list(range(seq * 500, seq * 500 + 500))))
        elif way == "cleared":
            post(http, pod, "gone", seq + 1, Cleared())
        else:
            http.delete(f"/v1/pods/{pod}").raise_for_status()
        assert depths(http, "gone", prompt(4, first=seq)) == {}
    wait_until(lambda: held() <= before, f"figures as before: {before}, not {held()}")


def test_an_engine_whose_buffer_rolled_over_is_followed(http: httpx.Client) -> None:
    """What its buffer has no more is a loss that is said; what it says from then on counts."""
    with Publisher(PublisherSettings(buffer_steps=2)) as publisher:
        for seq in range(5):
            publisher.publish(seq, payload(stored(range(seq * 9 + 1, seq * 9 + 3), first=seq * 1_000)))
        assert publisher.flush(DEADLINE_S)
        with followed(http, "rolled", "rolled", publisher):
            wait_until(lambda: rank(http, "rolled")["last_seq"] == 4, "what the buffer has")
            publisher.publish(5, payload(stored(range(46, 48), first=5_000)))
            wait_until(lambda: rank(http, "rolled")["last_seq"] == 5, "a live batch")
            found = [depths(http, "rolled", prompt(2, first=seq * 1_000)) for seq in range(6)]
            assert found == [{}] * 3 + [{"rolled": 2}] * 3
            assert rank(http, "rolled")["state"] == "degraded"
            assert "batches" in rank(http, "rolled")["cause"]


def test_a_dead_publisher_is_told_and_then_holds_nothing(http: httpx.Client) -> None:
    with contextlib.ExitStack() as cleanup:
        publisher = Publisher()
        cleanup.callback(publisher.stop)
        cleanup.enter_context(followed(http, "dead", "dead", publisher))
        publisher.publish(0, payload(stored(range(1, 5))))
        wait_until(lambda: depths(http, "dead", prompt(4)) == {"dead": 4}, "the batch")
        publisher.stop()
        wait_until(lambda: rank(http, "dead")["state"] == "down", "its end to be noticed")
        row = rows(http, "dead", prompt(4)).get("dead")
        assert row is None or row["state"] == "down", "until the deadline a match says that nobody is there"
        wait_until(lambda: depths(http, "dead", prompt(4)) == {}, "its deadline")
        assert rank(http, "dead")["blocks"]["gpu"] == 0
