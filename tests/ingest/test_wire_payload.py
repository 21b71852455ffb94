"""The native way through a payload cannot be told from the plain one, whatever the bytes."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import _native
from app.errors import UnreadableBatch
from app.events import BlockRemoved, BlockStored
from app.ingest import wire_decode, wire_payload
from app.ingest.wire_notation import CHILDREN_MAX
from tests.captures import CAPTURES, read_frames

STORED_ORDER = wire_decode._STORED_FIELDS
REMOVED_ORDER = wire_decode._REMOVED_FIELDS
CAPTURED = sorted(CAPTURES.glob("**/*.jsonl"))


def outcome(decode: Any, payload: bytes, block_size: int | None) -> Any:
    try:
        return decode(payload, block_size=block_size)
    except UnreadableBatch as error:
        return ("unreadable", error.detail, error.field)


def check(payload: bytes, block_size: int | None = None) -> Any:
    found = outcome(wire_payload.decode_batch, payload, block_size)
    assert found == outcome(wire_decode.decode_batch, payload, block_size)
    return found


def natively_read(payload: bytes) -> int:
    """Events of the payload that need no other decoder."""
    read = _native.msgpack_events(payload, CHILDREN_MAX)
    return 0 if read is None else sum(type(item) is tuple for item in read[2])


# -- it is taken


def stored(blocks: int, size: int, **changes: Any) -> dict[str, Any]:
    draw = random.Random(blocks)
    event = {
        "type": "BlockStored",
        "block_hashes": [draw.getrandbits(64) for _ in range(blocks)],
        "parent_block_hash": None,
        "token_ids": [draw.choice([7, 200, 40_000, 150_000, 2**32 - 1]) for _ in range(blocks * size)],
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **changes,
    }
    return {name: value for name, value in event.items() if value is not ...}


USUAL: dict[str, Any] = {
    "a map": stored(3, 4),
    "extra keys of nulls": stored(
        3, 4, extra_keys=[None] * 3, group_idx=0, kv_cache_spec_kind="full_attention"
    ),
    "extra keys": stored(2, 4, extra_keys=[["salt"], None], lora_name="l"),
    "fields of later releases": stored(
        2, 4, locality="LOCAL", ownership={"a": [1]}, lookahead_token_ids=[1, 2]
    ),
    "bytes for hashes": stored(1, 4, block_hashes=[b"x" * 32], parent_block_hash=b"y" * 32),
    "negative hashes": stored(2, 4, block_hashes=[-1, -(2**63)], parent_block_hash=-5),
    "an array": ["BlockStored", [1, 2], 9, [1, 2, 3, 4], 2, None],
    "an array of 0.23": [
        "BlockStored",
        [1],
        None,
        [1, 2],
        2,
        None,
        "CPU",
        "l",
        [None],
        3,
        "mla_attention",
        None,
    ],
    "removed": {"type": "BlockRemoved", "block_hashes": [1, 2], "medium": "GPU", "group_idx": 1},
    "removed, an array": ["BlockRemoved", [1, 2], "cpu"],
}


@pytest.mark.parametrize("name", USUAL)
def test_usual_events_are_read_natively(name: str) -> None:
    payload = msgspec.msgpack.encode([1.5, [USUAL[name]], 0])
    batch = check(payload)
    assert len(batch.events) == 1
    assert natively_read(payload) == 1


@pytest.mark.parametrize("path", CAPTURED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_captured_payloads(path: Any) -> None:
    """Of engines themselves: each the same, and hardly one event on the plain way but clears and ignored ones."""
    native = known = 0
    for frames in read_frames(path):
        batch = check(frames[-1], 16)
        if isinstance(batch, tuple):
            continue
        native += natively_read(frames[-1])
        known += sum(isinstance(event, BlockStored | BlockRemoved) for event in batch.events)
    assert native >= known * 0.9


# -- it says the same

small = st.integers(0, 5)
odd: st.SearchStrategy[Any] = st.sampled_from(
    [
        None,
        True,
        1.5,
        4.0,
        "",
        "GPU",
        b"",
        b"xy",
        [],
        [None],
        [1],
        [[1]],
        {},
        {"a": 1},
        -1,
        2**32,
        2**63,
        2**64 - 1,
    ]
)
hashes: st.SearchStrategy[Any] = st.one_of(
    st.integers(-(2**63), 2**64 - 1), small, st.binary(max_size=33), st.integers(0, 9)
)


def mostly(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 11).flatmap(lambda draw: odd if draw == 0 else usual)


def of_length(blocks: int, size: int) -> st.SearchStrategy[Any]:
    return st.lists(
        st.one_of(st.integers(0, 2**32 - 1), small), min_size=blocks * size, max_size=blocks * size
    )


@st.composite
def stored_fields(draw: st.DrawFn) -> dict[str, Any]:
    blocks, size = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    keys: st.SearchStrategy[Any] = st.lists(
        st.sampled_from([None, [], ["salt"], ["l"], [["mm", 3]], [b"digest"]]),
        min_size=blocks,
        max_size=blocks,
    )
    values: dict[str, st.SearchStrategy[Any]] = {
        "block_hashes": st.lists(hashes, min_size=blocks, max_size=blocks),
        "parent_block_hash": st.one_of(st.none(), hashes),
        "token_ids": of_length(blocks, size),
        "block_size": st.just(size),
        "lora_id": st.sampled_from([None, None, 3, -1, ""]),
        "medium": st.sampled_from([None, "GPU", "cpu", "Storage", "moon"]),
        "lora_name": st.sampled_from([None, "l", "", "x" * 1_025, "ü" * 1_024]),
        "extra_keys": st.one_of(st.none(), keys),
        "group_idx": st.sampled_from([None, 0, 2, 65_536]),
        "kv_cache_spec_kind": st.sampled_from([None, "full_attention", "mamba"]),
        "cache_salt": st.sampled_from([None, None, "salt"]),
        "metadata": st.sampled_from([None, {"anchor_hash": 5}, [1, {}], "x"]),
        "locality": odd,
    }
    return {name: draw(mostly(value)) for name, value in values.items()}


@st.composite
def events(draw: st.DrawFn) -> Any:
    if draw(st.integers(0, 15)) == 0:
        return draw(odd)
    tag = draw(st.sampled_from(["BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared", "Unknown"]))
    fields = draw(stored_fields())
    if draw(st.booleans()):
        order = REMOVED_ORDER if tag == "BlockRemoved" else STORED_ORDER
        length = draw(st.integers(0, len(order)))
        return [tag, *[fields[name] for name in order[:length]], *draw(st.lists(odd, max_size=1))]
    dropped = draw(st.sets(st.sampled_from(sorted(fields)), max_size=2))
    pairs = [("type", tag), *[(name, value) for name, value in fields.items() if name not in dropped]]
    if draw(st.integers(0, 7)) == 0:
        pairs = draw(st.permutations(pairs))
    return dict(pairs)


batches = st.one_of(
    st.tuples(mostly(st.just(1.5)), st.lists(events(), max_size=4), mostly(st.integers(0, 3))),
    st.tuples(st.just(1.5), st.lists(events(), max_size=4)),
    st.fixed_dictionaries({"ts": st.just(2), "events": st.lists(events(), max_size=2)}),
    odd,
)


@given(batches, st.sampled_from([None, 1, 2, 3]))
def test_same_as_the_plain_way(batch: Any, block_size: int | None) -> None:
    check(msgspec.msgpack.encode(batch), block_size)


@given(batches, st.data())
def test_same_for_damaged_bytes(batch: Any, data: st.DataObject) -> None:
    payload = bytearray(msgspec.msgpack.encode(batch))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(payload) - 1))
        kind = data.draw(st.sampled_from(["byte", "cut", "insert", "delete"]))
        if kind == "byte":
            payload[place] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del payload[max(place, 1) :]
        elif kind == "insert":
            payload.insert(
                place, data.draw(st.sampled_from([0x90, 0x80, 0xC0, 0xC1, 0xDD, 0xDF, 0xA0, 0x00]))
            )
        elif len(payload) > 1:
            del payload[place]
    check(bytes(payload), 2)


@given(st.binary(max_size=60))
def test_same_for_any_bytes(payload: bytes) -> None:
    check(payload)


@pytest.mark.parametrize("field", ["block_hashes", "token_ids", "type", "medium"])
def test_a_name_twice_counts_as_the_later(field: str) -> None:
    usual = stored(1, 2)
    raw = msgspec.msgpack.encode(usual)
    other = {"block_hashes": [5], "token_ids": [9, 9], "type": "BlockRemoved", "medium": "CPU"}[field]
    doubled = bytes([raw[0] + 1]) + raw[1:] + msgspec.msgpack.encode(field) + msgspec.msgpack.encode(other)
    check(b"\x92\x01\x91" + doubled)


def test_names_that_are_not_utf_8() -> None:
    raw = msgspec.msgpack.encode(stored(1, 2, lora_name="nm"))
    assert raw.count(b"\xa2nm") == 1
    check(b"\x92\x01\x91" + raw.replace(b"\xa2nm", b"\xa2\xff\xfe"))


# -- tokens, four readers at a time

any_token = st.sampled_from(
    [0, 127, 128, 255, 256, 52_428, 0xCDCE, 65_535, 65_536, 0xCECDCC, 150_000, 2**32 - 1]
)


@given(
    st.lists(any_token, min_size=1, max_size=40),
    st.integers(700, 9_000),
    st.sampled_from([None, -1, 1.5, 2**32, None]),
)
def test_long_arrays_of_tokens(pattern: list[int], count: int, odd_one: Any) -> None:
    """Tokens whose bytes look like other values, and one anywhere that is no token."""
    draw = random.Random(count)
    tokens: list[Any] = [draw.choice(pattern) for _ in range(count)]
    if odd_one is not None:
        tokens[draw.randrange(count)] = odd_one
    packed = msgspec.msgpack.encode(tokens)
    if odd_one is None:
        assert memoryview(_native.msgpack_token_ids(packed)).cast("I").tolist() == tokens
        assert memoryview(_native.msgpack_token_ids(packed)).nbytes == 4 * count
    else:
        with pytest.raises(_native.WireError, match=f"element {tokens.index(odd_one)} is"):
            _native.msgpack_token_ids(packed)
    cut = packed[: draw.randrange(3, len(packed))]
    with pytest.raises(_native.WireError):
        _native.msgpack_token_ids(cut)
