"""Two replicas over a real Redis that discover the same pods, each for itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.discovery.kubernetes_api import NAMESPACE, TOKEN, KubernetesApi
from tests.discovery.test_discovery import PROMPT, Indexer, indexer
from tests.discovery.waiting import put, until
from tests.replication.redis_server import RedisServer


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "redis").mkdir()
    with RedisServer(tmp_path / "redis", keep=True) as server:
        yield server


async def post(index: Indexer, pod: str, seq: int) -> None:
    stored = {
        "type": "BlockStored",
        "block_hashes": [1, 2, 3, 4, 5],
        "parent_block_hash": None,
        "token_ids": PROMPT,
        "block_size": 4,
    }
    answer = await index.http.post(
        "/v1/events", json={"pod": pod, "model": "m", "seq": seq, "events": [stored]}
    )
    assert answer.status_code == 200, answer.text


async def digest(index: Indexer) -> str:
    return str((await index.http.get("/v1/stats")).json()["digest"])


def test_replicas_that_see_the_same_change_a_pod_once(redis_server: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "namespace").write_text(NAMESPACE)

    async def run(api: KubernetesApi) -> None:
        settings: dict[str, Any] = {
            "discovery_kubernetes": "app=vllm",
            "discovery_kubernetes_engines": "zmq_port=5557,model=m",
            "discovery_kubernetes_api_url": api.url,
            "discovery_kubernetes_account": tmp_path,
            "discovery_deadline_s": 3_600.0,
            "redis_url": redis_server.url,
        }
        api.put("vllm-0", uid="uid-1")
        async with contextlib.AsyncExitStack() as life:
            one = await life.enter_async_context(indexer(**settings, replica_id="one"))
            two = await life.enter_async_context(indexer(**settings, replica_id="two"))
            both = (one, two)
            await until(lambda: all("vllm-0" in index.pods for index in both), "both know it")
            assert one.pods["vllm-0"].spec == two.pods["vllm-0"].spec
            await post(one, "vllm-0", 0)
            for index in both:
                await index.until_holds("vllm-0", 5)

            api.put("vllm-0", uid="uid-2")
            await until(
                lambda: all(
                    "vllm-0" in index.pods and index.pods["vllm-0"].spec.incarnation == "uid-2 at 10.0.0.1"
                    for index in both
                ),
                "both know its successor",
            )
            for index in both:
                await index.until_holds("vllm-0", 0)
            await post(two, "vllm-0", 0)
            for index in both:
                await index.until_holds("vllm-0", 5)

            # What both hand over again changes nothing: a third that starts now, and two more changes elsewhere.
            three = await life.enter_async_context(indexer(**settings, replica_id="three"))
            await three.until_holds("vllm-0", 5)
            await three.until_place("state", "working")
            api.put("vllm-1", uid="uid-3", ip="10.0.0.3")
            await until(lambda: all("vllm-1" in index.pods for index in (*both, three)), "all know another")
            assert [await index.holds("vllm-0") for index in (*both, three)] == [5, 5, 5]
            assert len({await digest(index) for index in (*both, three)}) == 1

            api.delete("vllm-0")
            await until(
                lambda: not any("vllm-0" in index.pods for index in (*both, three)), "gone everywhere"
            )
            api.end_watches()

    with KubernetesApi() as api:
        asyncio.run(run(api))


def test_what_is_discovered_waits_for_the_log_and_what_left_meanwhile_is_dropped(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    file = tmp_path / "pods"
    file.write_text("a=,model=m\nb=,model=m\n")
    settings: dict[str, Any] = {
        "pods_file": file,
        "redis_url": redis_server.url,
        "redis_timeout_s": 0.5,
        "redis_answer_timeout_s": 0.5,
    }

    async def run() -> None:
        async with indexer(**settings) as index:
            await until(lambda: set(index.pods) == {"a", "b"}, "the file's pods are there")
            redis_server.stop()
            put(file, "a=,model=m\nb=,model=m\nc=,model=m\n")
            await index.until_place("pods", {"registered": 2, "waiting": 1, "vanished": 0, "refused": 0})
            redis_server.start()
            await until(lambda: "c" in index.pods, "the third one when the log is back")
        put(file, "a=,model=m\n")
        async with indexer(**{**settings, "discovery_deadline_s": 2.0}) as index:
            await until(lambda: set(index.pods) == {"a", "b", "c"}, "the log has them all")
            await until(lambda: set(index.pods) == {"a"}, "those that the log remembers and nobody sees")

    asyncio.run(run())
