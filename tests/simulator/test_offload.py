"""The offload tier: chunks, masks, keys, capacity, and that it holds a chunk only when every worker does."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from typing import Any

import pytest

from app.errors import InvalidInput, InvalidSettings
from app.ingest.vllm import Removed, Stored
from app.simulator.offload import OffloadEngine, OffloadEngines, OffloadSettings
from app.simulator.offload_tier import OffloadTier

CHUNK = 4


def engine(**more: Any) -> OffloadEngine:
    return OffloadEngine(OffloadSettings(model="m", chunk_tokens=CHUNK, **more))


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def kv(token_ids: list[int]) -> list[str]:
    return [f"kv{token}" for token in token_ids]


def test_key_names_format_model_world_worker_and_chained_hash() -> None:
    one = engine(world_size=2, worker_id=1)
    first = hashlib.sha256(b"".join(t.to_bytes(4, "little") for t in tokens(4))).digest()
    second = hashlib.sha256(first + b"".join(t.to_bytes(4, "little") for t in tokens(4, 4))).digest()
    one.store(tokens(9), kv(tokens(9)))
    assert one.holds(first)
    assert one.holds(second)
    assert one.key(second) == f"vllm@m@2@1@{second.hex()}"


def test_default_chunk_is_256_tokens_and_a_rest_is_not_kept() -> None:
    one = OffloadEngine()
    assert one.store(tokens(600), kv(tokens(600))) == 2
    assert one.lookup(tokens(600)) == 512
    assert one.lookup(tokens(255)) == 0


def test_retrieve_returns_the_longest_cached_prefix_and_its_mask() -> None:
    one = engine()
    one.store(tokens(8), kv(tokens(8)))
    found, mask = one.retrieve([*tokens(8), 99, 98, 97, 96])
    assert found == kv(tokens(8))
    assert mask == [True] * 8 + [False] * 4
    assert one.stats().hit_rate == pytest.approx(8 / 12)


def test_masks_leave_out_whole_chunks_at_the_front() -> None:
    one = engine()
    mask = [False] * 4 + [True] * 8
    assert one.store(tokens(12), kv(tokens(8, 4)), mask) == 2
    assert one.lookup(tokens(12)) == 0
    found, present = one.retrieve(tokens(12), mask)
    assert found == kv(tokens(8, 4))
    assert present == mask
    assert one.retrieve(tokens(12))[0] == []


@pytest.mark.parametrize(
    ("mask", "items", "complaint"),
    [
        ([True] * 7, 8, "a mask of 7 for 8 tokens"),
        ([False] * 2 + [True] * 6, 6, "no multiple of 4"),
        ([True] * 4 + [False] * 4, 8, "front only"),
        (None, 7, "7 items of kv for 8 tokens"),
        ([False] * 4 + [True] * 4, 8, "8 items of kv for 4 tokens"),
    ],
)
def test_masks_that_cannot_be_are_refused(mask: list[bool] | None, items: int, complaint: str) -> None:
    one = engine()
    with pytest.raises(InvalidInput, match=complaint):
        one.store(tokens(8), ["kv"] * items, mask)
    assert one.stats().chunks == 0


def test_existing_chunks_are_skipped_or_written_again() -> None:
    one = engine()
    assert one.store(tokens(8), kv(tokens(8))) == 2
    assert one.store(tokens(12), kv(tokens(12))) == 1
    assert one.store(tokens(8), ["new"] * 8, skip_existing=False) == 2
    assert one.retrieve(tokens(4))[0] == ["new"] * 4


def test_the_least_recently_used_leaf_goes_first() -> None:
    one = engine(capacity_chunks=3)
    one.store(tokens(8), kv(tokens(8)))
    one.store(tokens(4, 100), kv(tokens(4, 100)))
    one.retrieve(tokens(8))
    one.store(tokens(4, 200), kv(tokens(4, 200)))
    assert (one.lookup(tokens(4, 100)), one.lookup(tokens(8)), one.stats().evicted_chunks) == (0, 8, 1)
    one.store(tokens(4, 300), kv(tokens(4, 300)))
    assert one.lookup(tokens(8)) == 4


def test_one_engine_an_id_and_a_conflict_is_refused() -> None:
    engines = OffloadEngines()
    first = engines.open("id", OffloadSettings(chunk_tokens=4))
    assert engines.open("id", OffloadSettings(chunk_tokens=4)) is first
    with pytest.raises(InvalidSettings, match="'id' exists with other settings"):
        engines.open("id", OffloadSettings(chunk_tokens=8))
    assert engines.close("id")
    assert not engines.close("id")
    with pytest.raises(InvalidInput, match="closed"):
        first.lookup(tokens(4))
    assert engines.open("id", OffloadSettings(chunk_tokens=8)) is not first


@pytest.mark.parametrize(
    "impossible", [{"chunk_tokens": 0}, {"world_size": 0}, {"worker_id": 1}, {"capacity_chunks": 0}]
)
def test_impossible_settings_are_refused(impossible: dict[str, int]) -> None:
    with pytest.raises(InvalidSettings):
        OffloadEngine(OffloadSettings(**impossible))  # type: ignore[arg-type]


# -- the tier


def tier(**more: Any) -> OffloadTier:
    return OffloadTier(OffloadSettings(chunk_tokens=CHUNK, **more))


def test_chunk_counts_only_when_every_worker_has_it() -> None:
    three = tier(world_size=3)
    three.store(tokens(8), workers=[0, 2])
    assert (three.lookup(tokens(8)), three.drain_events()) == (0, [])
    three.store(tokens(8), workers=[1])
    assert three.lookup(tokens(8)) == 8
    root, leaf = three.drain_events()
    assert isinstance(root, Stored)
    assert isinstance(leaf, Stored)
    assert (root.medium, root.block_size, list(root.token_ids)) == ("CPU", CHUNK, tokens(4))
    assert (root.parent_block_hash, leaf.parent_block_hash) == (None, root.block_hashes[0])


def test_first_worker_to_lose_a_chunk_removes_it_once() -> None:
    two = tier(world_size=2, capacity_chunks=2)
    two.store(tokens(8))
    two.drain_events()
    two.store(tokens(4, 100), workers=[0])
    (removed,) = two.drain_events()
    assert isinstance(removed, Removed)
    assert (removed.medium, two.lookup(tokens(8))) == ("CPU", 4)
    two.store(tokens(4, 200), workers=[1])
    assert two.drain_events() == []
    two.store(tokens(8))
    assert two.lookup(tokens(8)) == 8


def test_salt_and_adapter_separate_chunks() -> None:
    one = tier()
    one.store(tokens(4), salt="tenant")
    one.store(tokens(4), lora="adapter")
    assert one.lookup(tokens(4)) == 0
    assert one.lookup(tokens(4), salt="tenant") == 4
    assert one.lookup(tokens(4), lora="adapter") == 4
    salted, adapted = one.drain_events()
    assert isinstance(salted, Stored)
    assert isinstance(adapted, Stored)
    assert (salted.extra_keys, adapted.lora_name) == ([["tenant"]], "adapter")


@pytest.mark.parametrize("seed", range(10))
def test_any_history_is_told_as_it_is(seed: int) -> None:
    """What an indexer hears is what a lookup finds, whatever was stored and evicted where."""
    draw = random.Random(seed)
    workers = 1 + seed % 3
    cache = tier(world_size=workers, capacity_chunks=1 + seed)
    texts = [[first, *tokens(3), *tokens(CHUNK * 3, 10 * first)] for first in range(6)]
    heard: OrderedDict[Any, tuple[int, ...]] = OrderedDict()
    known: dict[Any, tuple[int, ...]] = {}
    for _ in range(300):
        text = draw.choice(texts)[: CHUNK * draw.randint(1, 4) + draw.randrange(CHUNK)]
        if draw.random() < 0.3:
            cache.load(text)
        else:
            some = draw.sample(range(workers), draw.randint(1, workers))
            cache.store(text, workers=some if draw.random() < 0.5 else None)
        for event in cache.drain_events():
            if isinstance(event, Stored):
                (name,) = event.block_hashes
                before = known[event.parent_block_hash] if event.parent_block_hash is not None else ()
                known[name] = (*before, *(int(str(token)) for token in event.token_ids))
                assert name not in heard, "told twice"
                heard[name] = known[name]
            elif isinstance(event, Removed):
                del heard[event.block_hashes[0]]
        prefixes = set(heard.values())
        for text in texts:
            depth = 0
            while depth < len(text) and tuple(text[: depth + CHUNK]) in prefixes:
                depth += CHUNK
            assert depth <= cache.lookup(text)
            if workers == 1:
                assert depth == cache.lookup(text)
