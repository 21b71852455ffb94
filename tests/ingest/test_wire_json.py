"""The body of POST /v1/events: a strict envelope around tolerant events."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from app.errors import UnreadableBatch
from app.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Tier
from app.ingest.vllm import Reject, decode_batch, decode_event_post, decode_json_events
from app.ingest.wire_decode import METADATA_BYTES_MAX
from app.ingest.wire_notation import CHILDREN_MAX
from tests.captures import pack, plain_hashes, plain_tokens

STORED = {
    "type": "BlockStored",
    "block_hashes": [1, -2],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "lora_name": None,
    "medium": "GPU",
    "extra_keys": [["salt"], None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "metadata": {"anchor": 5, "deep": [[{}]]},
}
EVENTS = [
    STORED,
    {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"},
    {"type": "AllBlocksCleared"},
]


def body(**changes: Any) -> bytes:
    return json.dumps({"pod": "pod-a", "events": EVENTS, **changes}).encode()


def decode(events: Any, **envelope: Any) -> EventBatch:
    return decode_json_events(decode_event_post(body(events=events, **envelope)))


def test_the_example_of_the_documentation() -> None:
    post = decode_event_post(body(dp_rank=1, model="m", seq=42, ts=1795226400.5))
    assert (post.pod, post.dp_rank, post.model, post.seq, post.ts) == ("pod-a", 1, "m", 42, 1795226400.5)
    assert decode_json_events(post, block_size=2) == EventBatch(
        events=(
            BlockStored(
                block_hashes=plain_hashes([1, -2]),
                parent_block_hash=None,
                token_ids=plain_tokens([1, 2, 3, 4]),
                block_size=2,
                extra_keys=(pack(["salt"]), b""),
                metadata=json.dumps(STORED["metadata"]).encode(),
            ),
            BlockRemoved(block_hashes=plain_hashes([1]), tier=Tier.CPU),
            AllBlocksCleared(),
        ),
        positions=(0, 1, 2),
        ts=1795226400.5,
        dp_rank=1,
    )


def test_what_may_be_left_out() -> None:
    post = decode_event_post(b'{"pod":"p","events":[]}')
    assert (post.dp_rank, post.model, post.seq, post.ts) == (0, None, None, None)
    assert decode_json_events(post) == EventBatch(events=(), positions=(), dp_rank=0)


def read_metadata(batch: EventBatch) -> tuple[EventBatch, object]:
    """Metadata is kept as it came, in either notation; whoever keeps it reads it."""
    stored = batch.events[0]
    assert isinstance(stored, BlockStored)
    assert stored.metadata is not None
    decode = json.loads if stored.metadata[:1] == b"{" else msgspec.msgpack.decode
    bare = msgspec.structs.replace(stored, metadata=None)
    return msgspec.structs.replace(batch, events=(bare, *batch.events[1:])), decode(stored.metadata)


def test_metadata_of_no_reasonable_length_is_cut_to_nothing() -> None:
    batch = decode([{**STORED, "metadata": {"long": "x" * METADATA_BYTES_MAX}}])
    (stored,) = batch.events
    assert isinstance(stored, BlockStored)
    assert stored.metadata == b""


def test_events_mean_the_same_in_both_notations() -> None:
    as_msgpack = decode_batch(msgspec.msgpack.encode([1.0, EVENTS, 0]))
    assert read_metadata(decode(EVENTS, ts=1.0)) == read_metadata(as_msgpack)


def test_white_space_means_nothing() -> None:
    spread = json.dumps({"pod": "pod-a", "events": EVENTS}, indent=3).encode()
    assert read_metadata(decode_json_events(decode_event_post(spread))) == read_metadata(decode(EVENTS))


def test_bytes_are_written_in_hexadecimal() -> None:
    digest = bytes(range(32))
    event = {**STORED, "block_hashes": [digest.hex(), 5], "parent_block_hash": "FF", "extra_keys": None}
    (stored,) = decode([event]).events
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == plain_hashes([digest, 5])
    assert stored.parent_block_hash == 255


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pod": ""}, "pod"),
        ({"pod": 5}, "pod"),
        ({"pod": None}, "pod"),
        ({"pod": "x" * 10_000}, "pod"),
        ({"model": ""}, "model"),
        ({"dp_rank": -1}, "dp_rank"),
        ({"dp_rank": 2**20}, "dp_rank"),
        ({"dp_rank": 0.5}, "dp_rank"),
        ({"seq": -1}, "seq"),
        ({"seq": 2**64 - 1}, "seq"),
        ({"seq": 2**70}, "seq"),
        ({"seq": "1"}, "seq"),
        ({"ts": "now"}, "ts"),
        ({"events": None}, "events"),
        ({"events": {}}, "events"),
        ({"events": [0] * (CHILDREN_MAX + 1)}, "events"),
        ({"evnts": []}, ""),
    ],
)
def test_a_fault_of_the_envelope_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UnreadableBatch) as caught:
        decode_event_post(body(**changes))
    assert caught.value.field == field
    assert caught.value.detail


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"pod":"p"}',
        b'{"events":[]}',
        b'\xff{"pod":"p","events":[]}',
        b"[" * 1_000_000,
    ],
)
def test_what_is_no_envelope(text: bytes) -> None:
    with pytest.raises(UnreadableBatch):
        decode_event_post(text)


def test_the_largest_sequence_number() -> None:
    assert decode_event_post(body(seq=2**64 - 2)).seq == 2**64 - 2


def test_a_nested_event_makes_the_body_unreadable_or_is_rejected() -> None:
    for depth in (10, 100_000):
        text = b'{"pod":"p","events":[' + b"[" * depth + b"]" * depth + b',{"type":"AllBlocksCleared"}]}'
        try:
            batch = decode_json_events(decode_event_post(text))
        except UnreadableBatch:
            assert depth > 10
        else:
            assert [fault.reason for fault in batch.rejected] == [Reject.UNREADABLE]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (5, Reject.UNREADABLE),
        ("BlockStored", Reject.UNREADABLE),
        (["BlockRemoved", [1]], Reject.UNREADABLE),
        ({}, Reject.MISSING_FIELD),
        ({"type": "Nothing"}, Reject.UNKNOWN_TYPE),
        ({**STORED, "block_hashes": [1, 2**64]}, Reject.BAD_HASH),
        ({**STORED, "block_hashes": [1, "xyz"]}, Reject.BAD_HASH),
        ({**STORED, "block_hashes": [1, 2.0]}, Reject.BAD_HASH),
        ({**STORED, "parent_block_hash": "x"}, Reject.BAD_HASH),
        ({**STORED, "parent_block_hash": "1],[1"}, Reject.BAD_HASH),
        ({**STORED, "token_ids": [1, 2, 3, 2**32]}, Reject.BAD_TOKEN),
        ({**STORED, "token_ids": "1234"}, Reject.BAD_TOKEN),
        ({**STORED, "token_ids": [1, 2, 3]}, Reject.LENGTH_MISMATCH),
        ({**STORED, "block_size": 0}, Reject.BLOCK_SIZE),
        ({**STORED, "block_size": 2.5}, Reject.BLOCK_SIZE),
        ({**STORED, "extra_keys": [["salt"]]}, Reject.BAD_EXTRA_KEYS),
        ({**STORED, "extra_keys": [[{"a": 1}], None]}, Reject.BAD_EXTRA_KEYS),
        ({**STORED, "medium": "TAPE"}, Reject.UNKNOWN_MEDIUM),
        ({**STORED, "group_idx": "0"}, Reject.BAD_FIELD),
    ],
)
def test_a_bad_event_costs_itself_only(event: Any, reason: Reject) -> None:
    batch = decode([EVENTS[2], event, EVENTS[2]])
    assert batch.events == (AllBlocksCleared(), AllBlocksCleared())
    assert batch.positions == (0, 2)
    assert [(fault.index, fault.reason) for fault in batch.rejected] == [(1, reason)]


def test_a_parent_cannot_smuggle_a_second_hash() -> None:
    text = b'{"pod":"p","events":[{"type":"BlockStored","block_hashes":[1],"parent_block_hash":1,2}]}'
    with pytest.raises(UnreadableBatch):
        decode_event_post(text)
