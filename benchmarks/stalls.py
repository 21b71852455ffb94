"""The longest single call of the index: while it grows, and while what pods held goes away.

    python -m benchmarks.stalls [--blocks 10000000] [--held 1000000]

Two pods hold so many blocks that nobody else has; one is cleared, the other dropped. What is left outlives its TTL at the
end, all at once. CPU time of this thread; a call is an event of 256 new blocks, a clear, or a slice of a sweep.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from app.index.prefix_index import IndexLimits
from app.service.service import SWEPT_A_PART
from benchmarks.measure import Goal, print_line, print_machine, print_timing, time_calls
from benchmarks.prefix_index import CHAIN_BLOCKS, Workload

SLICE = SWEPT_A_PART  # as the service sweeps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--held", type=int, default=1_000_000, help="blocks of each of the two pods that go")
    options = parser.parse_args()
    if options.held * 3 > options.blocks or options.held < CHAIN_BLOCKS:
        parser.error(f"--held is {CHAIN_BLOCKS} to a third of --blocks")
    print_machine()
    print(f"settings: {options}")

    work = Workload(options.blocks, fleet=4)
    cleared, dropped, *others = work.sources
    held = options.held // CHAIN_BLOCKS

    def holder(chain: int) -> int:
        return cleared if chain < held else dropped if chain < 2 * held else others[chain % 2]

    events = (work.event(chain, holder(chain)) for chain in range(work.chains))
    growth = time_calls(work.store_event, events)
    print_line(f"store 256 new blocks, {work.blocks} in all", growth)
    print_slowest("  of these calls", growth.slowest_us, 2)
    for chain in (0, held, 2 * held):
        check(work, chain, holder(chain), now=1)

    for name, go, source in (("clear", work.index.clear, cleared), ("drop", work.index.drop_source, dropped)):
        taken = time_calls(go, [source])
        print_timing(f"{name} a pod of {held * CHAIN_BLOCKS} blocks", taken, 100)
        first = 0 if source == cleared else held
        for chain in (first, first + held - 1):
            check(work, chain, None, now=1)
        print_slowest("  its sweep", sweep(work, now=1), 1)
    left = (work.chains - 2 * held) * CHAIN_BLOCKS
    assert work.index.stats().prefixes == left, "the sweeps take what the two held, and nothing else"

    expired = 1 + IndexLimits().ttl_ticks  # a match is a use
    check(work, work.chains - 1, None, now=expired)
    print_slowest(f"sweep of {left} expired blocks", sweep(work, now=expired), 1)
    assert work.index.stats().prefixes == 0, "nothing is left"


def check(work: Workload, chain: int, source: int | None, now: int) -> None:
    rows = work.index.match_tokens(work.context, work.tokens(chain), None, now)
    assert {row.source: row.tiers[0] for row in rows} == ({} if source is None else {source: CHAIN_BLOCKS})


def sweep(work: Workload, now: int) -> list[float]:
    """Microseconds of each slice, until a pass that began behind the change is done."""
    slowest_us: list[float] = []
    idle: list[bool] = []

    def slice_of(visits: int) -> None:
        idle.append(work.index.sweep(now, visits).idle)

    for _ in range(2):
        while not slowest_us or not idle[-1]:
            slowest_us += time_calls(slice_of, [SLICE]).slowest_us
        idle.append(False)
    return slowest_us


def print_slowest(name: str, slowest_us: Iterable[float], at_most_ms: float) -> None:
    """The third beside the longest: the host may interrupt a call, or two."""
    first, _, third = (us / 1e3 for us in sorted(slowest_us, reverse=True)[:3])
    print_line(name, f"the longest {first:.2f} ms, the third {third:.2f} ms", Goal(first, at_most_ms, "ms"))


if __name__ == "__main__":
    main()
