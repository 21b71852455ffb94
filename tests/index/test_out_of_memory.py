"""Where the system gives no more memory a store fails, and what it began can still be removed and swept.

In a process of its own, whose address space is bounded at some place while it stores: which table meets the bound is
up to the place.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STORY = """
import random, resource, signal, sys
from pathlib import Path
from app.index.prefix_index import IndexLimits, PrefixIndex

signal.alarm(60)  # whoever looks for ever for what is not there
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
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + room, resource.RLIM_INFINITY))
failures = 0
while failures < 3:
    try:
        store()
    except MemoryError:
        failures += 1
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store()
index.clear(source)
while not index.sweep(0, 2_048).idle:
    pass
stats = index.stats()
assert (stats.prefixes, stats.engine_keys) == (0, 0), stats
store()
assert index.blocks_by_tier(source)[0] == blocks, index.blocks_by_tier(source)
"""


@pytest.mark.skipif("TEST_CORE" in os.environ, reason="sanitizers need all of the address space")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("blocks", [1, 256])
@pytest.mark.parametrize("room", [131_072 * n for n in (3, 7, 10, 16, 23)])
def test_store_without_memory(room: int, blocks: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STORY, str(room), str(blocks)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
