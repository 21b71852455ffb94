"""A chunk that only some workers hold is in no answer of the indexer, whatever order the workers store and lose it in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import httpx
import pytest

from app.ingest.vllm import WireForm, encode_batch
from app.replay.indexer import own_indexer
from app.simulator.offload import OffloadSettings
from app.simulator.offload_tier import OffloadTier

CHUNK_TOKENS = 256
PROMPT = list(range(2 * CHUNK_TOKENS))
WORKERS = 3


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with own_indexer() as started:
        yield started


class Told:
    """A tier, and an indexer that is told what it says."""

    def __init__(self, url: str, pod: str, *, capacity_chunks: int = 100) -> None:
        self.tier = OffloadTier(OffloadSettings(world_size=WORKERS, capacity_chunks=capacity_chunks))
        self._url = url
        self._fields = {"pod": pod, "model": pod}
        self._seqs = itertools.count()

    def depth(self) -> int:
        """Tokens of the prompt on tier `cpu`, as the indexer sees it now."""
        events = self.tier.drain_events()
        if events:
            payload = encode_batch(WireForm.MAPS_0_33, ts=0.0, events=events)
            query = {**self._fields, "seq": str(next(self._seqs))}
            told = httpx.post(
                f"{self._url}/v1/events",
                params=query,
                content=payload,
                headers={"content-type": "application/msgpack"},
            )
            assert told.json()["rejected"] == []
        asked = {"model": self._fields["model"], "token_ids": PROMPT}
        rows = httpx.post(f"{self._url}/v1/match", json=asked).json()["matches"]
        return max((row["matched_tokens"] for row in rows), default=0)


@pytest.mark.parametrize("order", list(itertools.permutations(range(WORKERS))), ids=str)
def test_the_last_worker_to_store_makes_it_match(url: str, order: tuple[int, ...]) -> None:
    told = Told(url, f"store-{order}")
    for worker in order[:-1]:
        told.tier.store(PROMPT, workers=[worker])
        assert told.depth() == 0
    told.tier.store(PROMPT[:CHUNK_TOKENS], workers=[order[-1]])
    assert told.depth() == CHUNK_TOKENS == told.tier.lookup(PROMPT)
    told.tier.store(PROMPT, workers=[order[-1]])
    assert told.depth() == 2 * CHUNK_TOKENS == told.tier.lookup(PROMPT)


def test_the_first_worker_to_lose_a_chunk_ends_it(url: str) -> None:
    told = Told(url, "lose", capacity_chunks=2)
    told.tier.store(PROMPT)
    assert told.depth() == 2 * CHUNK_TOKENS
    told.tier.store([7] * CHUNK_TOKENS, workers=[1])
    assert told.depth() == CHUNK_TOKENS == told.tier.lookup(PROMPT)
    told.tier.store([8] * CHUNK_TOKENS, workers=[2])
    assert told.depth() == told.tier.lookup(PROMPT)
