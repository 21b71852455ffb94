"""Where the system gives no more memory a call fails, and what is stored and removed then is what is there afterwards.

In a process of its own, whose address space is bounded while blocks come and go: which table meets the bound is up to
the place.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

START = """
import random, resource, signal, sys
from pathlib import Path
from app.fuzzy.fuzzy_index import FuzzyIndex, FuzzyLimits

signal.alarm(60)  # whoever looks for ever for what is not there
chance = random.Random(int(sys.argv[1]))
index = FuzzyIndex(FuzzyLimits())
index.add_context(7, 16)

def bound(most):
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
"""


STORY = """
room, batch = int(sys.argv[1]), int(sys.argv[2])
live = []
while len(live) < 40_000 // batch:
    live.append(chance.randbytes(8 * batch))
    index.store(7, live[-1], chance.randbytes(64 * batch))
most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + room
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
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
tokens, failures, awake = bytes(4 * 64), 0, 0
while not awake:
    bound(taken + failures * more)
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
most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + room
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
    done = subprocess.run(
        [sys.executable, "-c", START + story, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif("TEST_CORE" in os.environ, reason="sanitizers need all of the address space")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("room", "batch"), [(0, 16), (131_072, 16), (0, 256), (131_072, 256), (1_000_000, 256)]
)
def test_blocks_come_and_go_without_memory(room: int, batch: int) -> None:
    tell(STORY, room, batch)


@pytest.mark.skipif("TEST_CORE" in os.environ, reason="sanitizers need all of the address space")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("more", [10_000, 50_000, 200_000])
def test_a_context_that_wakes_without_memory_goes_on_when_there_is_some(more: int) -> None:
    tell(WAKING, more)


@pytest.mark.skipif("TEST_CORE" in os.environ, reason="sanitizers need all of the address space")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("room", "batch"), [(0, 16), (131_072, 16), (0, 256), (131_072, 256), (1_000_000, 256)]
)
def test_an_awake_context_without_memory_loses_nothing_that_waits_for_its_tables(
    room: int, batch: int
) -> None:
    tell(AWAKE, room, batch)
