"""Raw bytes into every native decoder: msgpack, JSON, packed numbers, snapshot frames.

What they mean is held elsewhere (test_wire.py, ingest/test_wire_payload.py, index/test_export.py); here it is that no
bytes do harm, which only the build with sanitizers can see: `make sanitize` runs this with more examples of each, and
without Python's own allocator, which would hide a read past the end of a small buffer. Half of the inputs are something
valid with a few bytes changed: noise alone never gets far.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app import _native, hashing
from app.errors import InvalidInput, UnreadableBatch
from app.index.prefix_index import IndexLimits, PrefixIndex
from app.ingest.vllm import decode_batch, decode_event_post, decode_json_events, plain_batch

EXAMPLES = int(os.environ.get("RAW_BYTES_EXAMPLES", "100"))
TOKENS = [[7, 200, 40_000, 150_000, 2**32 - 1][n % 5] for n in range(900)]
EVENT = {
    "type": "BlockStored",
    "block_hashes": [1, 2**64 - 1],
    "parent_block_hash": b"p" * 32,
    "token_ids": [1, 2, 70_000, 4],
    "block_size": 2,
    "lora_name": "l",
    "medium": "GPU",
    "extra_keys": [None, ["salt"]],
}
POST = {"pod": "p", "events": [{**EVENT, "parent_block_hash": None, "block_hashes": ["ab" * 8, 3]}]}
PLAIN_EVENTS = [
    {"type": "BlockStored", "block_hashes": list(range(100)), "token_ids": TOKENS, "block_size": 9},
    {"type": "BlockRemoved", "block_hashes": [1, 2**64 - 1], "medium": "GPU"},
]
MSGPACK = [
    msgspec.msgpack.encode([1.5, PLAIN_EVENTS, 0]),
    msgspec.msgpack.encode([1.5, [EVENT, ["BlockRemoved", [1, 2], "GPU"], ["AllBlocksCleared"]], 0]),
    msgspec.msgpack.encode({"events": [EVENT], "ts": 1}),
    msgspec.msgpack.encode(TOKENS),
    msgspec.msgpack.encode([-1, 2**63, b"x" * 32]),
]
JSON = [
    msgspec.json.encode({"pod": "p", "model": "m", "seq": 7, "ts": 1.5, "events": PLAIN_EVENTS}),
    msgspec.json.encode(POST),
    msgspec.json.encode({"model": "m", "token_ids": TOKENS[:200], "prefix_hashes": [2**64 - 1]}),
    msgspec.json.encode(TOKENS),
    b"[1, 2,\t3 , 18446744073709551615]",
    b'["abcdef", -9223372036854775808]',
]
HEADS = [
    b"POST /v1/match?model=m HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n"
]
PLAIN = plain_batch()
READERS: dict[str, Callable[[bytes], Any]] = {
    "msgpack_token_ids": _native.msgpack_token_ids,
    "msgpack_hashes": _native.msgpack_hashes,
    "msgpack_unsigned": _native.msgpack_unsigned,
    "msgpack_child_count": _native.msgpack_child_count,
    "msgpack_children": lambda data: _native.msgpack_children(data, 1_000),
    "msgpack_grandchildren": lambda data: _native.msgpack_grandchildren(data, 1_000),
    "msgpack_events": lambda data: _native.msgpack_events(data, 1_000),
    "plain payload": lambda data: PLAIN.read_msgpack(data, 100) and PLAIN.events(),
    "plain body": lambda data: PLAIN.read_json(data, 100) and PLAIN.events(),
    "request_head": _native.request_head,
    "HeadBook": lambda data: _native.HeadBook().put(data),
    "decode_batch": decode_batch,
    "json_token_ids": _native.json_token_ids,
    "json_hashes": _native.json_hashes,
    "json_unsigned": _native.json_unsigned,
    "json_cut": lambda data: _native.json_cut(data, 10_000, 100),
    "json_child_count": lambda data: _native.json_child_count(data, 1_000),
    "scan_json": _native.scan_json,
    "scan_json_by_words": _native.scan_json_by_words,
    "scan_json_tokens": _native.scan_json_tokens,
    "decode_event_post": lambda data: decode_json_events(decode_event_post(data)),
}


@st.composite
def damaged(draw: st.DrawFn, valid: list[bytes]) -> bytes:
    """Something valid with bytes changed, cut out, doubled or added."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2, 4]))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from([0, 1, 1, 2, 9, 40, 90, 1_000])))
        data[start:end] = draw(st.one_of(st.binary(max_size=9), st.just(bytes(data[start:end]) * 2)))
    # Most readers that go too far go past the end of something that was cut off.
    return bytes(data[: len(data) - draw(st.one_of(st.just(0), st.integers(1, 300)))])


KINDS = {
    "anything": st.binary(max_size=300),
    "msgpack": damaged(MSGPACK),
    "JSON": damaged(JSON),
    "heads": damaged(HEADS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_readers_of_wire_bytes(kind: str) -> None:
    """Every input goes to every reader: to think of one takes longer than to read it twenty times."""

    @settings(max_examples=2 * EXAMPLES, deadline=None)
    @example(b"")
    @given(KINDS[kind])
    def check(data: bytes) -> None:
        for name, read in READERS.items():
            try:
                read(data)
            except (_native.WireError, UnreadableBatch):
                pass
            except Exception as failure:
                failure.add_note(f"read by {name}")
                raise

    check()


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=100), st.integers(0, 2**64 - 1), st.booleans())
def test_packed_numbers(tokens: bytes, hashes: bytes, parent: int, orphan: bool) -> None:
    """Buffers of octet bodies: whole numbers are taken whatever they are, others are refused."""
    index = PrefixIndex(IndexLimits(orphan_blocks_max=8))
    source, context = index.add_source(), index.context("m", None, 2, 0)
    with contextlib.suppress(InvalidInput):
        index.store(
            source, context, tier=0, group=0, engine_hashes=hashes, parent=parent if orphan else None,
            token_ids=tokens[: len(hashes)], extra_keys=None, now=0,
        )  # fmt: skip
    for ask in (
        lambda: index.match_tokens(context, tokens, None, 1),
        lambda: index.match_hashes(context, hashes, 1),
        lambda: index.add_speculative(context, source, hashes, 5, 1),
        lambda: index.remove(source, tier=0, group=0, engine_hashes=hashes, now=2),
        lambda: hashing.prefix_hashes("m", None, 2, tokens),
    ):
        with contextlib.suppress(InvalidInput):
            ask()


def exported() -> tuple[list[bytes], PrefixIndex]:
    """Frames of names, of copies, of removals, of several slots."""
    index = PrefixIndex(IndexLimits(ttl_ticks=0))
    sources = [index.add_source() for _ in range(3)]
    context = index.context("m", None, 2, 0)
    draw = random.Random(0)
    for source in sources:
        for tier in (0, 1):
            names = draw.sample(range(1, 40), 12)
            index.store(
                source, context, tier=tier, group=0,
                engine_hashes=b"".join(name.to_bytes(8, "little") for name in [*names, names[0]]),
                parent=None, token_ids=b"".join(n.to_bytes(4, "little") for n in range(26)), extra_keys=None, now=1,
            )  # fmt: skip
    writing = index.start_export()
    frame, done = writing.names(7)
    frames = [frame]
    while not done:
        frame, done = writing.names(7)
        frames.append(frame)
    index.remove(sources[0], tier=0, group=0, engine_hashes=bytes(range(1, 9)) + b"\x05" + b"\0" * 7, now=2)
    index.clear(sources[2])
    frames.append(writing.changes(1_000)[0])
    writing.close()
    return frames, index


FRAMES, EXPORTED = exported()


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.one_of(damaged(FRAMES), damaged(FRAMES), st.binary(max_size=200)), min_size=1, max_size=4))
def test_snapshot_frames(frames: list[bytes]) -> None:
    """Whatever the frames say, the index they were read into can be used, swept and cleared."""
    fresh = PrefixIndex(IndexLimits(ttl_ticks=10, prefixes_per_context_max=20))
    sources = [fresh.add_source() for _ in range(3)]
    context = fresh.context("m", None, 2, 0)
    importing = fresh.start_import(saved_at=2, elapsed=1, now=3)
    for slot in EXPORTED.slots():
        importing.slot(slot, context=context, source=sources[slot.source - 1])
    for frame in frames:
        importing.frame(frame)
    fresh.match_tokens(context, b"".join(n.to_bytes(4, "little") for n in range(26)), None, 4)
    fresh.slots()
    fresh.stats()
    cursor: int | None = 0
    while cursor is not None:
        _, cursor = fresh.names(cursor, 10, 4)
    for source in sources[1:]:
        fresh.remove(source, tier=0, group=0, engine_hashes=bytes(8) + b"\x05" + bytes(7), now=5)
    fresh.clear(sources[0])
    fresh.sweep(20, 10_000)
    fresh.drop_source(sources[1])
