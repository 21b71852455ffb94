"""What of a batch is applied, ignored or refused before anything changes: sizes of tiers, the order of what is said."""

from __future__ import annotations

from app.events import AllBlocksCleared, BlockStored, Event, EventBatch, RejectedEvent, Tier
from app.service.sifting import sift


def stored(size: int, *, tier: Tier = Tier.GPU, name: int = 1) -> BlockStored:
    return BlockStored(
        block_hashes=name.to_bytes(8, "little"),
        parent_block_hash=None,
        token_ids=bytes(4 * size),
        block_size=size,
        tier=tier,
    )


def batch(*events: Event, rejected: tuple[RejectedEvent, ...] = (), at: tuple[int, ...] = ()) -> EventBatch:
    return EventBatch(events=events, positions=at or tuple(range(len(events))), rejected=rejected)


def test_a_chunk_that_is_no_multiple_of_a_block_is_no_size_of_its_tier() -> None:
    """It is the unfinished end of a prompt, and larger than the whole chunks that come: were it learned, they would be
    ignored from there on."""
    learned = sift(batch(stored(16), stored(40, tier=Tier.CPU)), None, {})
    assert learned.chunk_sizes == {}
    assert [event for event in learned.events if isinstance(event, BlockStored)] == [stored(16)]
    assert learned.ignored == 1
    later = sift(batch(stored(32, tier=Tier.CPU)), learned.block_size, learned.chunk_sizes)
    assert later.chunk_sizes == {Tier.CPU: 32}
    assert later.events == (stored(32, tier=Tier.CPU),)


def test_the_first_size_of_the_gpu_tier_is_its_size() -> None:
    sifted = sift(batch(stored(64, tier=Tier.DISK), stored(16), stored(32, name=2)), None, {})
    assert sifted.block_size == 16
    assert [event.index for event in sifted.rejected] == [2]
    assert sifted.events == (stored(64, tier=Tier.DISK), stored(16))


def test_what_is_refused_is_told_in_the_order_of_the_batch() -> None:
    """Whoever refused it: the codec comes first, and sees some of the later ones."""
    unread = tuple(RejectedEvent(index=index, reason="unreadable", detail="") for index in (1, 4))
    sifted = sift(
        batch(AllBlocksCleared(), stored(32), stored(64), stored(16), rejected=unread, at=(0, 2, 3, 5)),
        16,
        {},
    )
    assert [(event.index, event.reason) for event in sifted.rejected] == [
        (1, "unreadable"),
        (2, "block_size"),
        (3, "block_size"),
        (4, "unreadable"),
    ]
    assert sifted.events == (AllBlocksCleared(), stored(16))
    assert not sifted.is_useless
