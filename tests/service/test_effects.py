"""What events do beyond their own blocks: to the sizes of tiers, to whom blocks are for, to the trust in a source."""

from __future__ import annotations

import struct
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from app.config import Settings
from app.errors import LimitExceeded
from app.events import BlockStored, Envelope, Event, EventBatch, PrefixesStored, Tier
from app.index.prefix_index import PrefixIndex
from app.pods import Source
from app.service import BatchResult, IndexerService, MatchQuery, index_limits
from app.service.fuzzy_queries import fuzzy_index
from tests.serving.test_serving import DEADLINE_S, ROOT

SIZE = 16


def service(**settings: Any) -> IndexerService:
    made = Settings(**settings)
    contents = fuzzy_index(made)
    index = PrefixIndex(index_limits(made), contents)
    return IndexerService(made, index, clock=lambda: 1_000.0, contents=contents)


def uint64s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def stored(name: int, size: int = SIZE, tier: Tier = Tier.GPU) -> BlockStored:
    return BlockStored(
        block_hashes=uint64s(name),
        parent_block_hash=None,
        token_ids=struct.pack(f"<{size}I", *[name] * size),
        block_size=size,
        tier=tier,
    )


def post(to: IndexerService, *events: Event, pod: str = "a", owner: str | None = None) -> BatchResult:
    batch = EventBatch(events=events, positions=tuple(range(len(events))))
    return to.post(Envelope(pod=pod, model="m", owner=owner), batch)


def source(of: IndexerService) -> Source:
    return of.pods["a"].sources[0]


def test_a_tier_that_learns_a_larger_chunk_forgets_its_smaller_ones_and_no_other_tiers() -> None:
    told = service()
    post(told, stored(1), stored(2, 32, Tier.CPU), stored(3, 32, Tier.DISK))
    assert told.blocks_by_tier("a", 0) == {"gpu": 1, "cpu": 1, "disk": 1, "external": 0}
    post(told, stored(4, 64, Tier.CPU))
    assert told.blocks_by_tier("a", 0) == {"gpu": 1, "cpu": 1, "disk": 1, "external": 0}
    assert source(told).chunk_sizes == {Tier.CPU: 64, Tier.DISK: 32}


def test_a_chunk_as_large_as_a_block_is_forgotten_on_its_tier_only() -> None:
    """Its context is that of the GPU's blocks."""
    told = service()
    post(told, stored(1), stored(2, SIZE, Tier.CPU))
    post(told, stored(3, 4 * SIZE, Tier.CPU))
    assert told.blocks_by_tier("a", 0) == {"gpu": 1, "cpu": 1, "disk": 0, "external": 0}


def test_a_restarted_engine_may_have_smaller_chunks() -> None:
    told = service()
    post(told, stored(1), stored(2, 4 * SIZE, Tier.CPU))
    told.reset_source("a", 0, restarted=True)
    result = post(told, stored(1), stored(3, 2 * SIZE, Tier.CPU))
    assert (result.stored_blocks, result.ignored) == (2, 0)
    assert source(told).chunk_sizes == {Tier.CPU: 2 * SIZE}


def prefixes(*names: int, tier: Tier = Tier.GPU, **more: Any) -> PrefixesStored:
    return PrefixesStored(
        block_hashes=uint64s(*names), prefix_hashes=uint64s(*names), block_size=SIZE, tier=tier, **more
    )


def test_a_dump_of_another_tier_tells_that_the_source_offloads() -> None:
    """A clear of the GPU's cache cannot make such a picture whole again."""
    told = service()
    post(told, prefixes(1, 2))
    assert not source(told).offloads
    post(told, prefixes(3, tier=Tier.DISK))
    assert source(told).offloads


def test_owners_of_a_dump_do_not_each_look_through_all_its_blocks() -> None:
    """In a process that can be ended: it would take a minute and a half."""
    script = """
import msgspec
from tests.service.test_effects import post, prefixes, service
names = [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(1, 120_001)]
told = service(fuzzy=True, owners_max=10_000)
said = [{"owner": f"owner-{name}", "blocks": [name]} for name in names[:10_000]]
post(told, prefixes(*names, owners=msgspec.json.encode(said)))
assert len(told.owners.all()) == 10_000 and all(info.blocks == 1 for info in told.owners.all())
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=DEADLINE_S)


def test_owners_for_whom_there_is_no_room_are_not_looked_for_among_all() -> None:
    """In a process that can be ended: it would take two minutes."""
    script = """
import msgspec
from tests.service.test_effects import post, prefixes, service
names = [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(1, 10_001)]
told = service(fuzzy=True, owners_max=10_000)
said = [{"owner": f"owner-{name}", "blocks": [name]} for name in names]
post(told, prefixes(*names, owners=msgspec.json.encode(said)))
assert not any(told.owners.has_room_for(f"late-{number}") for number in range(100_000))
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=DEADLINE_S)


def test_owners_of_a_dump_past_the_bound_are_left_out_and_counted_and_their_blocks_are_not() -> None:
    told = service(fuzzy=True, owners_max=1)
    said = [
        {"owner": "one", "blocks": [1, 9]},
        {"owner": "two", "blocks": [2]},
        {"owner": "three", "blocks": [7]},
    ]
    result = post(told, prefixes(1, 2, owners=msgspec.json.encode(said)))
    assert result.stored_blocks == 2
    assert [(info.owner, info.blocks) for info in told.owners.all()] == [("one", 1)]
    assert told.owners.counters() == {"refused": 1}, "of the third nothing is here"


def test_a_batch_that_is_refused_for_its_owner_leaves_no_pod_behind() -> None:
    told = service(fuzzy=True, owners_max=1)
    post(told, stored(1), owner="one")
    with pytest.raises(LimitExceeded):
        post(told, stored(1), pod="b", owner="two")
    assert told.pods.keys() == {"a"}


def test_what_an_owner_claimed_is_gone_when_it_is_cleared() -> None:
    """There is a bound on the claims of all: those of names that nobody knows any more would fill it."""
    told = service(fuzzy=True)
    post(told, stored(1), stored(2), owner="one")
    assert told.stats()["index"]["claims"] == 2
    assert [info.owner for info in told.owners.clear("one")] == ["one"]
    told.tick()
    assert told.stats()["index"]["claims"] == 0


def test_an_answer_about_some_pods_goes_the_way_that_has_hints_where_one_of_these_has_any() -> None:
    told = service()
    metadata = msgspec.json.encode({"agent": "planner"})
    post(told, msgspec.structs.replace(stored(1), metadata=metadata))
    post(told, stored(1), pod="b")

    def has_hints(*pods: str) -> bool:
        asked = struct.pack(f"<{SIZE}I", *[1] * SIZE)
        query = MatchQuery(model="m", token_ids=asked, pods=frozenset(pods) if pods else None)
        rows = told.match(query).matches
        assert (told.match_json(query) is None) == any(row.hints for row in rows)
        return any(row.hints for row in rows)

    assert has_hints()
    assert has_hints("a")
    assert has_hints("a", "b")
    assert not has_hints("b")
