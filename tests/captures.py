"""Frames that engines published (tests/data/captures), and the plain reading of them that tests trust.

`plain_batch` reads decoded events, one Python object a value, in the obvious way: the codec must agree.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from app.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, Tier

CAPTURES = Path(__file__).parent / "data" / "captures"

STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def read_frames(path: Path) -> Iterator[list[bytes]]:
    """The frames of every message of a capture, in order."""
    for line in read_lines(path):
        if "frames" in line:
            yield [base64.b64decode(frame) for frame in line["frames"]]


def pack(value: Any) -> bytes:
    """msgpack in its shortest form, written from its specification."""
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int():
            return _pack_int(value)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            data = value.encode()
            head = bytes([0xA0 | len(data)]) if len(data) < 32 else _pack_length(len(data), 0xD9)
            return head + data
        case bytes():
            return _pack_length(len(value), 0xC4) + value
        case list() | tuple():
            size = len(value)
            head = bytes([0x90 | size]) if size < 16 else b"\xdc" + size.to_bytes(2, "big")
            return head + b"".join(pack(item) for item in value)
    raise AssertionError(f"{value!r} has no canonical encoding")


def _pack_int(value: int) -> bytes:
    if 0 <= value < 128:
        return bytes([value])
    if -32 <= value < 0:
        return bytes([256 + value])
    for tag, width in enumerate((1, 2, 4, 8)):
        if 0 <= value < 256**width:
            return bytes([0xCC + tag]) + value.to_bytes(width, "big")
        if -(256**width) // 2 <= value < 0:
            return bytes([0xD0 + tag]) + value.to_bytes(width, "big", signed=True)
    raise AssertionError(f"{value} has more than 64 bits")


def _pack_length(length: int, first_tag: int) -> bytes:
    for tag, width in enumerate((1, 2, 4)):
        if length < 256**width:
            return bytes([first_tag + tag]) + length.to_bytes(width, "big")
    raise AssertionError("too long")


def plain_hash(value: Any) -> int:
    if isinstance(value, dict):
        value = bytes.fromhex(value["$bytes"])
    if isinstance(value, bytes):
        return int.from_bytes(value[-8:], "big")
    assert isinstance(value, int)
    return value % 2**64


def plain_hashes(values: Sequence[Any]) -> bytes:
    return b"".join(plain_hash(value).to_bytes(8, "little") for value in values)


def plain_tokens(values: Sequence[int]) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def plain_event(event: Any) -> Event:
    """A GPU event of an engine that is indexed as it stands."""
    if isinstance(event, list):
        tag, *values = event
        names = STORED_FIELDS if tag == "BlockStored" else REMOVED_FIELDS
        event = {"type": tag, **dict(zip(names, values, strict=False))}
    assert event.get("medium") in (None, "GPU")
    group = event.get("group_idx") or 0
    match event["type"]:
        case "AllBlocksCleared":
            return AllBlocksCleared()
        case "BlockRemoved":
            return BlockRemoved(block_hashes=plain_hashes(event["block_hashes"]), tier=Tier.GPU, group=group)
    assert event["type"] == "BlockStored"
    lora = event.get("lora_name") or (str(event["lora_id"]) if event["lora_id"] is not None else None)
    keys = [[key for key in keys or [] if key != lora] for keys in event.get("extra_keys") or []]
    encoded = tuple(pack(block) if block else b"" for block in keys)
    parent = event["parent_block_hash"]
    return BlockStored(
        block_hashes=plain_hashes(event["block_hashes"]),
        parent_block_hash=None if parent is None else plain_hash(parent),
        token_ids=plain_tokens(event["token_ids"]),
        block_size=event["block_size"],
        lora=lora,
        tier=Tier.GPU,
        group=group,
        extra_keys=encoded if any(encoded) else None,
    )


def plain_batch(batch: list[Any]) -> EventBatch:
    ts, events, rank = batch
    return EventBatch(
        events=tuple(plain_event(event) for event in events),
        positions=tuple(range(len(events))),
        ts=ts,
        dp_rank=rank,
    )
