"""Where the system gives no more memory a call fails, and what is stored and removed then is what is there afterwards."""

from __future__ import annotations

import pytest

from tests import scarce_memory

pytestmark = scarce_memory.MARKS

START = """
from app.fuzzy.fuzzy_index import FuzzyIndex, FuzzyLimits

chance = random.Random(int(sys.argv[1]))
index = FuzzyIndex(FuzzyLimits())
index.add_context(7, 16)
"""


STORY = """
room, batch = int(sys.argv[1]), int(sys.argv[2])
live = []
while len(live) < 40_000 // batch:
    live.append(chance.randbytes(8 * batch))
    index.store(7, live[-1], chance.randbytes(64 * batch))
most = taken() + room
failures = 0
for turn in range(1_500):
    coming = turn % 3 != 2
    prefixes = chance.randbytes(8 * batch) if coming else live.pop(chance.randrange(len(live)))
    tokens = chance.randbytes(64 * batch)
    bound(most)
    try:
        if coming:
            index.store(7, prefixes, tokens)
            live.append(prefixes)
        else:
            index.remove(7, prefixes)
        bound(resource.RLIM_INFINITY)
    except MemoryError:
        bound(resource.RLIM_INFINITY)
        failures += 1
        index.remove(7, prefixes)
assert failures > 0
assert set(index.prefix_hashes(7)) == {
    int.from_bytes(each[at : at + 8], "little") for each in live for at in range(0, 8 * batch, 8)
}
"""


WAKING = """
more = int(sys.argv[1])
live = []
for _ in range(400):
    live.append(chance.randbytes(8 * 256))
    index.store(7, live[-1], chance.randbytes(64 * 256))
before = taken()
tokens, failures, awake = bytes(4 * 64), 0, 0
while not awake:
    bound(before + failures * more)
    try:
        awake = index.core.exact(7, tokens, 1, 0, 1)[1]
        bound(resource.RLIM_INFINITY)
    except MemoryError:
        bound(resource.RLIM_INFINITY)
        failures += 1
assert failures > 10
assert set(index.prefix_hashes(7)) == {
    int.from_bytes(each[at : at + 8], "little") for each in live for at in range(0, 8 * 256, 8)
}
"""


AWAKE = """
room, batch = int(sys.argv[1]), int(sys.argv[2])
live = []
while len(live) < 40_000 // batch:
    live.append((chance.randbytes(8 * batch), chance.randbytes(64 * batch)))
    index.store(7, *live[-1])

def find(tokens):
    while not (found := index.core.exact(7, tokens, len(tokens) // 64, 0, 64))[1]:
        pass
    return found[0]

find(live[0][1])
most = taken() + room
failures = 0
for turn in range(3_000):
    coming = turn % 3 != 2
    block = (chance.randbytes(8 * batch), chance.randbytes(64 * batch)) if coming else None
    gone = None if coming else live.pop(chance.randrange(len(live)))[0]
    bound(most)
    try:
        if block:
            index.store(7, *block)
            live.append(block)
        else:
            index.remove(7, gone)
        bound(resource.RLIM_INFINITY)
    except MemoryError:
        bound(resource.RLIM_INFINITY)
        failures += 1
        index.remove(7, block[0] if block else gone)
    if turn % 64 == 0:
        find(bytes(64))
assert failures > 0
assert set(index.prefix_hashes(7)) == {
    int.from_bytes(prefixes[at : at + 8], "little") for prefixes, _ in live for at in range(0, 8 * batch, 8)
}
"""


def tell(story: str, *arguments: int) -> None:
    scarce_memory.tell(START + story, *arguments)


@pytest.mark.parametrize(
    ("room", "batch"), [(0, 16), (131_072, 16), (0, 256), (131_072, 256), (1_000_000, 256)]
)
def test_blocks_come_and_go_without_memory(room: int, batch: int) -> None:
    tell(STORY, room, batch)


@pytest.mark.parametrize("more", [10_000, 50_000, 200_000])
def test_a_context_that_wakes_without_memory_goes_on_when_there_is_some(more: int) -> None:
    tell(WAKING, more)


@pytest.mark.parametrize(
    ("room", "batch"), [(0, 16), (131_072, 16), (0, 256), (131_072, 256), (1_000_000, 256)]
)
def test_an_awake_context_without_memory_loses_nothing_that_waits_for_its_tables(
    room: int, batch: int
) -> None:
    tell(AWAKE, room, batch)
