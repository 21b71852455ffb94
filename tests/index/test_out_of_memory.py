"""Where the system gives no more memory a store fails, and what it began can still be removed and swept."""

from __future__ import annotations

import pytest

from tests import scarce_memory

pytestmark = scarce_memory.MARKS

STORY = """
from app.index.prefix_index import IndexLimits, PrefixIndex

room, blocks = int(sys.argv[1]), int(sys.argv[2])
chance = random.Random(room)
index = PrefixIndex(IndexLimits(ttl_ticks=0))
context = index.context("model", None, 1, 0)
source = index.add_source()

def store():
    index.store(
        source, context, tier=0, group=0, engine_hashes=chance.randbytes(8 * blocks), parent=None,
        token_ids=chance.randbytes(4 * blocks), extra_keys=None, now=0,
    )

for _ in range(20_000 // blocks):
    store()
bound(taken() + room)
failures = 0
while failures < 3:
    try:
        store()
    except MemoryError:
        failures += 1
bound(resource.RLIM_INFINITY)
store()
index.clear(source)
while not index.sweep(0, 2_048).idle:
    pass
stats = index.stats()
assert (stats.prefixes, stats.engine_keys) == (0, 0), stats
store()
assert index.blocks_by_tier(source)[0] == blocks, index.blocks_by_tier(source)
"""


NAMED = """
from app.index.prefix_index import IndexLimits, PrefixIndex

room, blocks, engines = (int(argument) for argument in sys.argv[1:])
chance = random.Random(room)
index = PrefixIndex(IndexLimits(ttl_ticks=0))
context = index.context("model", None, 1, 0)
sources = [index.add_source() for _ in range(engines)]
told = []

def store(source, token_ids):
    told.append((source, chance.randbytes(8 * blocks)))
    index.store(
        source, context, tier=0, group=0, engine_hashes=told[-1][1], parent=None, token_ids=token_ids,
        extra_keys=None, now=0,
    )

for _ in range(6_000 // blocks):
    store(sources[0], chance.randbytes(4 * blocks))
failures = 0
for _ in range(60):
    spare = bytes(1_000_000)  # for what it takes to say that there is memory again
    most = taken() + room
    try:
        bound(most)
        while True:
            token_ids = chance.randbytes(4 * blocks)
            for source in sources:
                store(source, token_ids)
    except MemoryError:
        del spare
        bound(resource.RLIM_INFINITY)
        failures += 1
for source, engine_hashes in told:
    index.remove(source, tier=0, group=0, engine_hashes=engine_hashes, now=0)
stats = index.stats()
assert failures == 60
assert (stats.prefixes, stats.engine_keys, stats.holder_sets) == (0, 0, 0), stats
assert not any(index.blocks_by_tier(source)[0] for source in sources)
"""


SWEPT = """
from app.index.prefix_index import IndexLimits, PrefixIndex

chance = random.Random(1)
index = PrefixIndex(IndexLimits(ttl_ticks=0))
context = index.context("model", None, 1, 0)
gone, stays = index.add_source(), index.add_source()
chains = [(chance.randbytes(16), chance.randbytes(32)) for _ in range(20_000)]
for token_ids, engine_hashes in chains:
    for source, blocks in (gone, 2), (stays, 4):
        index.store(
            source, context, tier=0, group=0, engine_hashes=engine_hashes[: 8 * blocks], parent=None,
            token_ids=token_ids[: 4 * blocks], extra_keys=None, now=0,
        )
    index.remove(stays, tier=0, group=0, engine_hashes=engine_hashes[8:16], now=0)
index.clear(gone)

failures = 0
while failures < 20:  # of what is behind a block that goes: it has to be listed
    bound(taken())
    try:
        idle = index.sweep(0, 4_096).idle
        bound(resource.RLIM_INFINITY)
        if idle:
            break
    except MemoryError:
        bound(resource.RLIM_INFINITY)
        failures += 1
assert failures > 0
while not index.sweep(0, 4_096).idle:
    pass
fresh = index.add_source()  # takes the place of the one that is gone
index.store(
    fresh, context, tier=0, group=0, engine_hashes=bytes(8), parent=None, token_ids=bytes(4), extra_keys=None, now=0
)
assert index.stats().prefixes == 3 * len(chains) + 1, index.stats()
assert all(row.source == stays for ids, _ in chains for row in index.match_tokens(context, ids, None, 0))
"""


@pytest.mark.parametrize("blocks", [1, 256])
@pytest.mark.parametrize("room", [131_072 * n for n in (3, 7, 10, 16, 23)])
def test_store_without_memory(room: int, blocks: int) -> None:
    scarce_memory.tell(STORY, room, blocks)


@pytest.mark.parametrize("engines", [1, 3])
@pytest.mark.parametrize("blocks", [1, 16])
@pytest.mark.parametrize("room", [0, 65_536, 300_000])
def test_what_was_stored_without_memory_can_be_taken_away_by_its_names(
    room: int, blocks: int, engines: int
) -> None:
    """Each engine has names of its own for the same blocks. Nothing is held without a name; no set of holders stays."""
    scarce_memory.tell(NAMED, room, blocks, engines)


def test_a_sweep_without_memory_leaves_nothing_behind() -> None:
    """What it could not take away the next pass does, before the bits of those who held it are used again."""
    scarce_memory.tell(SWEPT)
