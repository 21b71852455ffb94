"""A snapshot of many blocks: seconds to save and to be back, the longest slice, bytes on disk; the answer checked.

    python -m benchmarks.snapshot [--blocks 1000000] [--pods 4]

Every block is held by all pods and has a random engine hash and a random prefix hash, which is what engines make
them: neither can be compressed. Saving runs on an event loop beside a task that does nothing but ask for the loop
every 100 us; the longest time that it had to wait is what a match would have waited at most.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

from app.config import load_settings
from app.index.prefix_index import PrefixIndex
from app.pods import PodSpec
from app.service import IndexerService, index_limits
from app.snapshots.file import FileStore
from app.snapshots.keeper import SnapshotKeeper
from benchmarks.measure import print_line, print_machine

BLOCKS_PER_EVENT = 4_096


def made(path: Path, blocks: int) -> tuple[IndexerService, PrefixIndex, SnapshotKeeper]:
    settings = load_settings(prefixes_per_context_max=2 * blocks)
    index = PrefixIndex(index_limits(settings))
    service = IndexerService(settings, index, clock=time.monotonic)
    return (
        service,
        index,
        SnapshotKeeper(service, index, FileStore(path), configured=frozenset(), interval_s=60),
    )


def fill(service: IndexerService, index: PrefixIndex, blocks: int, pods: int) -> None:
    random_ = random.Random(1)
    context = index.context("bench", None, 16, 0)
    names = [f"pod-{number}" for number in range(pods)]
    sources = [service.register(PodSpec(name, "bench")).sources[0].index_id for name in names]
    for _ in range(blocks // BLOCKS_PER_EVENT):
        engine_hashes = random_.randbytes(BLOCKS_PER_EVENT * 8)
        prefix_hashes = random_.randbytes(BLOCKS_PER_EVENT * 8)
        for source in sources:
            index.store_prefixes(
                source,
                context,
                tier=0,
                group=0,
                engine_hashes=engine_hashes,
                prefix_hashes=prefix_hashes,
                copies=None,
                now=0,
            )


class Waiting:
    """The longest time that the loop kept a task waiting that wanted to go on."""

    longest_s = 0.0

    async def watch(self) -> None:
        while True:
            asked_s = time.perf_counter()
            await asyncio.sleep(0.0001)
            self.longest_s = max(self.longest_s, time.perf_counter() - asked_s - 0.0001)


async def run(folder: Path, blocks: int, pods: int) -> None:
    path = folder / "snapshot"
    service, index, keeper = made(path, blocks)
    fill(service, index, blocks, pods)
    waiting = Waiting()
    watch = asyncio.create_task(waiting.watch())
    began_s = time.perf_counter()
    assert await keeper.save()
    save_s = time.perf_counter() - began_s
    watch.cancel()
    print_line(f"save, {blocks:,} blocks held by {pods} pods", f"{save_s:.2f} s")
    print_line("longest wait for the loop meanwhile", f"{waiting.longest_s * 1e3:.1f} ms")
    size = path.stat().st_size
    print_line("on disk", f"{size / 1e6:.0f} MB, {size / blocks:.1f} bytes a block")
    digest = service.stats()["digest"]
    del service, index, keeper

    service, _, keeper = made(path, blocks)
    began_s = time.perf_counter()
    await keeper.restore()
    print_line("restore (check, read, index)", f"{time.perf_counter() - began_s:.2f} s")
    assert service.stats()["digest"] == digest, "what came back is not what was saved"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--pods", type=int, default=4, help="pods that hold each block")
    options = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder), options.blocks, options.pods))


if __name__ == "__main__":
    main()
