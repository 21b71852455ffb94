"""The last value that each bound of the wire lets through, and the first that it does not, by both decoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from app.errors import UnreadableBatch
from app.events import BlockStored, EventBatch, PrefixesStored
from app.ingest import wire_decode, wire_payload
from app.ingest.wire_decode import METADATA_BYTES_MAX, RANK_MAX
from app.ingest.wire_fields import BLOCK_SIZE_MAX, COPIES_MAX, GROUP_MAX, TEXT_MAX, Reject

Decode = Callable[[bytes], EventBatch]
STORED = {
    "type": "BlockStored",
    "block_hashes": [1],
    "parent_block_hash": None,
    "token_ids": [1, 2],
    "block_size": 2,
}
PREFIXES = {"type": "PrefixesStored", "block_hashes": [1, 2], "prefix_hashes": [3, 4], "block_size": 2}


@pytest.fixture(
    params=[wire_decode.decode_batch, wire_payload.decode_batch], ids=["every form", "usual form"]
)
def decode(request: pytest.FixtureRequest) -> Decode:
    decoder: Decode = request.param
    return decoder


def payload(*events: dict[str, Any], rank: int | None = None) -> bytes:
    return msgspec.msgpack.encode([1.0, events, rank])


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({"group_idx": GROUP_MAX}, ("group", GROUP_MAX)),
        ({"lora_name": "x" * TEXT_MAX}, ("lora", "x" * TEXT_MAX)),
        ({"block_size": BLOCK_SIZE_MAX, "token_ids": [7] * BLOCK_SIZE_MAX}, ("block_size", BLOCK_SIZE_MAX)),
    ],
    ids=["group", "adapter", "block size"],
)
def test_the_last_value_of_a_field_is_read(
    decode: Decode, fields: dict[str, Any], value: tuple[str, Any]
) -> None:
    (event,) = decode(payload(STORED | fields)).events
    assert isinstance(event, BlockStored)
    assert getattr(event, value[0]) == value[1]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"group_idx": GROUP_MAX + 1}, Reject.BAD_FIELD),
        ({"group_idx": -1}, Reject.BAD_FIELD),
        ({"lora_name": "x" * (TEXT_MAX + 1)}, Reject.BAD_FIELD),
        ({"block_size": BLOCK_SIZE_MAX + 1, "token_ids": [7] * (BLOCK_SIZE_MAX + 1)}, Reject.BLOCK_SIZE),
        ({"block_size": 0}, Reject.BLOCK_SIZE),
    ],
    ids=["group", "negative group", "adapter", "block size", "no block size"],
)
def test_the_first_value_past_the_bound_costs_its_event(
    decode: Decode, fields: dict[str, Any], reason: Reject
) -> None:
    batch = decode(payload(STORED | fields, STORED))
    assert [(event.index, event.reason) for event in batch.rejected] == [(0, reason)]
    assert len(batch.events) == 1


def test_the_rank_of_a_batch(decode: Decode) -> None:
    assert decode(payload(STORED, rank=RANK_MAX)).dp_rank == RANK_MAX
    for rank in (RANK_MAX + 1, -1):
        with pytest.raises(UnreadableBatch, match=f"0 to {RANK_MAX}"):
            decode(payload(STORED, rank=rank))


@pytest.mark.parametrize(("more", "kept"), [(0, True), (1, False)])
def test_metadata_past_its_bound_is_no_metadata_and_its_block_is_stored(
    decode: Decode, more: int, kept: bool
) -> None:
    text = "x" * (METADATA_BYTES_MAX - 3 + more)  # msgpack says the length of a text in three bytes
    (event,) = decode(payload(STORED | {"metadata": text})).events
    assert isinstance(event, BlockStored)
    assert event.metadata == (msgspec.msgpack.encode(text) if kept else b"")


def test_copies_are_from_one_on(decode: Decode) -> None:
    (event,) = decode(payload(PREFIXES | {"copies": [1, COPIES_MAX]})).events
    assert isinstance(event, PrefixesStored)
    for copies in ([0, 1], [1, COPIES_MAX + 1]):
        (rejected,) = decode(payload(PREFIXES | {"copies": copies})).rejected
        assert rejected.reason == Reject.BAD_FIELD
    (rejected,) = decode(payload(PREFIXES | {"copies": [1]})).rejected
    assert rejected.reason == Reject.LENGTH_MISMATCH


def test_the_salt_of_a_prompt_is_of_its_first_block(decode: Decode) -> None:
    """SGLang tells it with every event of the prompt; the hash of the first block has it in, and so have all behind."""
    root, child = decode(
        payload(STORED | {"cache_salt": "s"}, STORED | {"parent_block_hash": 9, "cache_salt": "s"})
    ).events
    assert isinstance(root, BlockStored)
    assert isinstance(child, BlockStored)
    assert root.extra_keys is not None
    assert child.extra_keys is None
