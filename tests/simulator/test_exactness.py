"""Simulated pods and a real indexer, over real sockets: every prediction is what the pod then reused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from app.ingest.vllm import WireForm
from app.replay.indexer import own_indexer
from tests.simulator.exactness import FAULTS, Plan, run


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with own_indexer() as started:
        yield started


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(seed=1, requests=500), id="faults"),
        pytest.param(Plan(seed=2, requests=250, pods=2, dp_size=2), id="ranks"),
        pytest.param(Plan(seed=3, requests=150, pods=2, form=WireForm.ARRAYS_0_17), id="arrays"),
        pytest.param(Plan(seed=4, requests=150, pods=2, form=WireForm.MAPS_0_24), id="maps"),
        pytest.param(Plan(seed=5, requests=150, pods=2, draft_tokens=3), id="drafts"),
        pytest.param(Plan(seed=6, requests=150, pods=2, faults=False, by_http=True), id="http"),
    ],
)
def test_every_prediction_is_exact_wherever_the_pod_has_told(url: str, plan: Plan) -> None:
    driver = asyncio.run(run(plan, url))
    assert driver.wrong == []
    assert driver.outcomes["told exact"] > plan.requests * 0.9
    if plan.requests >= 500:
        assert set(driver.faults_made) == set(FAULTS)


@pytest.mark.parametrize("chunk_tokens", [16, 64, 256])
def test_what_the_gpu_lost_is_still_matched_in_the_offload_tier(url: str, chunk_tokens: int) -> None:
    """Chunks of another size than the engine's blocks, on another tier, held only by all workers together."""
    plan = Plan(
        seed=chunk_tokens,
        requests=150,
        pods=2,
        faults=False,
        offload_chunk_tokens=chunk_tokens,
        offload_chunks=9_600 // chunk_tokens,
    )
    driver = asyncio.run(run(plan, url))
    assert driver.wrong == []
    assert driver.outcomes["told exact"] == plan.requests
    assert driver.outcomes["tokens from offload"] > 1_000
