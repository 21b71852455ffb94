"""Row by row what a connector says of a block: request -> pod -> event -> indexer -> match -> router -> the same pod."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from app.ingest.vllm import WireForm
from app.replay.indexer import POLL_INTERVAL_S, own_indexer
from app.simulator.engine_settings import EngineSettings
from app.simulator.fleet import Fleet, FleetSettings
from app.simulator.offload import OffloadSettings
from app.simulator.pod import PodSettings

DEADLINE_S = 20.0
CHUNK_TOKENS = 32
ABOUT = {"agent_id": "planner", "workflow_step": 3, "cla_group": 2, "offset_hint": [0.5, 1.0]}
PROMPT = list(range(100, 100 + CHUNK_TOKENS))  # one chunk, two blocks


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with own_indexer() as started:
        yield started


@asynccontextmanager
async def fleet(url: str, name: str, **pod: Any) -> AsyncIterator[tuple[Fleet, httpx.AsyncClient]]:
    offload = OffloadSettings(chunk_tokens=CHUNK_TOKENS, capacity_chunks=2)
    engine = EngineSettings(offload=offload)
    settings = PodSettings(name=name, model=name, engine=engine, speed=float("inf"), **pod)
    async with (
        Fleet(FleetSettings(pods=1, pod=settings, indexer_urls=(url,))) as started,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        yield started, http


async def complete(pods: Fleet, http: httpx.AsyncClient, prompt: list[int], **about: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": about or None}
    response = await http.post(f"{pods.pods[0].url}/v1/completions", json=body)
    assert response.status_code == 200, response.text


async def told(http: httpx.AsyncClient, url: str, model: str, prompt: list[int]) -> Any:
    """The row of the prompt, once the pod's blocks of it are known on both tiers."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        answer = await http.post(f"{url}/v1/match", json={"model": model, "token_ids": prompt})
        rows = answer.json()["matches"]
        if rows and rows[0]["tiers"]["gpu"] == 2:
            return rows[0]
        await asyncio.sleep(POLL_INTERVAL_S)
    raise AssertionError(f"the indexer never heard of it: {rows}")


def metadata(prompt: list[int], pods: Fleet) -> dict[str, Any]:
    connector = pods.pods[0].pod.ranks[0].connector
    fields = connector.build_prefix_hint(prompt, **ABOUT).as_fields()  # type: ignore[arg-type]
    return {**fields, "offset_hint": ABOUT["offset_hint"]}


def test_metadata_comes_back_and_keeps_its_chunk_from_eviction(url: str) -> None:
    async def run() -> None:
        async with fleet(url, "hinted") as (pods, http):
            await complete(pods, http, PROMPT, **ABOUT)
            await complete(pods, http, [7] * CHUNK_TOKENS)
            row = await told(http, url, pods.pods[0].pod.settings.model, PROMPT)
            said = metadata(PROMPT, pods)
            assert [(hint["tier"], hint["tokens"]) for hint in row["hints"]] == [("gpu", 32), ("cpu", 32)]
            assert [hint["metadata"] for hint in row["hints"]] == [said, said]
            assert set(said) == {
                *("anchor_hash", "agent_id", "token_length", "pre_rope"),
                *("cla_group", "workflow_step", "offset_hint"),
            }

            # Two chunks fit. The prompt's is the older one; with its hints on the next request it is not.
            tier = pods.pods[0].pod.ranks[0].engine.offload
            assert tier is not None
            await complete(pods, http, [8] * CHUNK_TOKENS, agent_id="planner", hints=row["hints"])
            assert (tier.lookup(PROMPT), tier.lookup([7] * CHUNK_TOKENS)) == (CHUNK_TOKENS, 0)

            connector = (await http.get(f"{pods.pods[0].url}/connector")).json()
            assert connector == [{"active": True, "switches": 0, "pending_saves": 0}]

    asyncio.run(run())


def test_the_older_chunk_goes_without_hints(url: str) -> None:
    async def run() -> None:
        async with fleet(url, "plain") as (pods, http):
            for prompt in (PROMPT, [7] * CHUNK_TOKENS, [8] * CHUNK_TOKENS):
                await complete(pods, http, prompt)
            tier = pods.pods[0].pod.ranks[0].engine.offload
            assert tier is not None
            assert tier.lookup(PROMPT) == 0
            row = await told(http, url, pods.pods[0].pod.settings.model, PROMPT)
            assert row["hints"] is None

    asyncio.run(run())


def test_array_forms_have_no_place_for_it(url: str) -> None:
    async def run() -> None:
        async with fleet(url, "arrays", form=WireForm.ARRAYS_0_17) as (pods, http):
            await complete(pods, http, PROMPT, **ABOUT)
            row = await told(http, url, pods.pods[0].pod.settings.model, PROMPT)
            assert row["hints"] is None

    asyncio.run(run())
