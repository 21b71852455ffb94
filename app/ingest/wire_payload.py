"""The payload of one message to app.events: natively where the events are the usual ones.

One native pass reads the batch (native/event_payload.hpp). What is plain comes out as buffers and small values,
and is judged here as app/ingest/wire_decode.py judges it; what is not plain, or would be ignored or rejected,
goes there as a span, and a payload that is no batch of the usual shape goes there as a whole. So that decoder
is the truth of every form, this one is its shortcut, and tests/ingest/test_wire_payload.py holds both equal.

Cost for 256 blocks: docs/performance-notes.md.
"""

from __future__ import annotations

from app import _native
from app.errors import InvalidInput
from app.events import BlockRemoved, BlockStored, Event, EventBatch, RejectedEvent, Tier
from app.extra_keys import event_extra_keys
from app.ingest import wire_decode
from app.ingest.wire_decode import INDEXABLE_KINDS, batch_rank, batch_ts, decode_event
from app.ingest.wire_fields import TIERS, Rejected
from app.ingest.wire_notation import CHILDREN_MAX, KEY_BYTES_MAX, MSGPACK, Malformed


def decode_batch(payload: bytes | memoryview, *, block_size: int | None = None) -> EventBatch:
    """The msgpack payload of one message, of any engine and release.

    `block_size` is the pod's, in tokens; None when it is not known yet. Raises UnreadableBatch when the
    payload is not a batch, which says nothing about the next one.
    """
    read = _native.msgpack_events(payload, CHILDREN_MAX)
    if read is None:
        return wire_decode.decode_batch(payload, block_size=block_size)
    ts, rank, items = read
    events: list[Event] = []
    positions: list[int] = []
    rejected: list[RejectedEvent] = []
    for index, item in enumerate(items):
        event: Event | None = None
        span = item
        if not isinstance(span, bytes):
            event = _plain_event(span, block_size)
            if event is None:
                span = bytes(payload[span[0] : span[1]])
        if event is None:
            assert isinstance(span, bytes), "what is not plain is a span"
            try:
                event = decode_event(MSGPACK, span, block_size)
            except Rejected as fault:
                rejected.append(fault.at(index))
                continue
        if event is not None:
            events.append(event)
            positions.append(index)
    return EventBatch(
        events=tuple(events),
        positions=tuple(positions),
        rejected=tuple(rejected),
        ignored=len(items) - len(events) - len(rejected),
        ts=ts if isinstance(ts, float) else batch_ts(ts),
        dp_rank=batch_rank(rank) if isinstance(rank, bytes) else rank,
    )


def plain_batch() -> _native.PlainBatch:
    """For one batch after the other; what it reads, `decode_batch` reads as the same events."""
    return _native.PlainBatch([(name, int(tier)) for name, tier in TIERS.items()], sorted(INDEXABLE_KINDS))


def _plain_event(
    item: _native.PlainStored | _native.PlainRemoved, pod_block_size: int | None
) -> BlockStored | BlockRemoved | None:
    """None: for the decoder of every form, which finds out why."""
    medium = item[3]
    tier = Tier.GPU if medium is None else TIERS.get(medium.lower())
    if tier is None:
        return None
    if len(item) == 5:
        return BlockRemoved(block_hashes=item[2], tier=tier, group=item[4])
    _, _, hashes, _, group, parent, tokens, block_size, lora, kind, raw_keys = item
    if kind is not None and kind not in INDEXABLE_KINDS:
        return None
    if block_size != pod_block_size and pod_block_size is not None:
        return None
    keys = None
    if raw_keys is not None:
        if len(raw_keys) > KEY_BYTES_MAX:
            return None
        try:
            keys = event_extra_keys(MSGPACK.key_lists(raw_keys), block_count=len(hashes) // 8, lora=lora)
        except (InvalidInput, *Malformed):
            return None
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=block_size,
        lora=lora,
        tier=tier,
        group=group,
        extra_keys=keys,
    )
