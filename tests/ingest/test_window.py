"""What a tracker remembers, and what it forgets first."""

from __future__ import annotations

from app.ingest.actions import Deliver
from app.ingest.window import DigestRing, HeldBatches, HoldBudget

SIZE = 4


def test_the_ring_keeps_the_newest_numbers_whatever_comes_late() -> None:
    """A replay brings old numbers behind new ones: were those forgotten for them, a frame that came twice would pass for
    another engine's."""
    ring = DigestRing(SIZE)
    for seq in (9, 10, 5, 6):
        ring.put(seq, 100 + seq)
    assert [ring.get(seq) for seq in (5, 6, 9, 10)] == [None, None, 109, 110]
    ring.put(13, 113)
    assert [ring.get(seq) for seq in (9, 13)] == [None, 113]
    ring.put(13, 213)
    assert ring.get(13) == 213
    ring.clear()
    ring.put(1, 7)
    assert [ring.get(seq) for seq in (1, 13)] == [7, None]


def test_held_batches_are_bounded_in_number_and_share_their_bytes() -> None:
    budget = HoldBudget(5)
    held, other = HeldBatches(2, budget), HeldBatches(9, budget)
    for seq in (7, 3, 5):
        held.put(Deliver(seq, b"x", digest=seq))
    assert (len(held), budget.used_bytes, budget.overflows) == (2, 2, 1)
    other.put(Deliver(0, b"xxx", digest=0))
    other.put(Deliver(1, b"x", digest=1))
    assert (len(other), budget.used_bytes, budget.overflows) == (1, 5, 2)
    assert [batch.seq for batch in held.take_all()] == [3, 7]
    assert budget.used_bytes == 3
    assert other.pop(0) is not None
    assert other.pop(0) is None
    assert budget.used_bytes == 0
