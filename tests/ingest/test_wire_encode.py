"""What is published in a release's form is read back as that; and no bytes break the reader."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import UnreadableBatch
from app.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, Tier
from app.extra_keys import event_extra_keys
from app.ingest.vllm import (
    Cleared,
    Reject,
    Removed,
    Stored,
    WireEvent,
    WireForm,
    decode_batch,
    decode_event_post,
    decode_json_events,
    encode_batch,
)
from tests.captures import CAPTURES, plain_hash, plain_hashes, plain_tokens, read_frames

TIERS = {None: Tier.GPU, "GPU": Tier.GPU, "CPU": Tier.CPU, "CPU_PINNED": Tier.CPU, "STORAGE": Tier.DISK}
hashes = st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=8, max_size=32)
media = st.sampled_from(list(TIERS))
groups = st.none() | st.integers(0, 3)
adapters = st.none() | st.sampled_from(["ad", "tenant"])
block_keys = st.none() | st.lists(
    st.sampled_from(["ad", "tenant", b"\x01" * 32]) | st.just(["img", 4]), max_size=3
)


@st.composite
def stored_events(draw: st.DrawFn) -> Stored:
    block_size = draw(st.sampled_from([1, 4, 16]))
    blocks = draw(st.integers(1, 4))
    count = blocks * block_size
    return Stored(
        block_hashes=draw(st.lists(hashes, min_size=blocks, max_size=blocks)),
        parent_block_hash=draw(st.none() | hashes),
        token_ids=draw(st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count)),
        block_size=block_size,
        lora_id=draw(st.sampled_from([None, -1, 7])),
        medium=draw(media),
        lora_name=draw(adapters),
        extra_keys=draw(st.none() | st.lists(block_keys, min_size=blocks, max_size=blocks)),
        group_idx=draw(groups),
        kv_cache_spec_kind=draw(st.sampled_from([None, "full_attention", "mla_attention"])),
        kv_cache_spec_sliding_window=draw(st.sampled_from([None, 128])),
        locality=draw(st.sampled_from([None, "LOCAL"])),
        ownership=draw(st.sampled_from([None, "OWNED"])),
        session_id=draw(st.sampled_from([None, "s1"])),
        lookahead_token_ids=draw(st.sampled_from([None, [1, 2]])),
        cache_salt=draw(st.sampled_from([None, "salt"])),
    )


removed_events = st.builds(
    Removed, block_hashes=st.lists(hashes, min_size=1, max_size=4), medium=media, group_idx=groups
)
wire_events = stored_events() | removed_events | st.just(Cleared())


def meaning(form: WireForm, event: WireEvent) -> Event:
    """What a release can say of an event: fields that its form does not have are at their defaults."""

    def field(name: str) -> Any:
        names = form.value.stored if isinstance(event, Stored) else form.value.removed
        return getattr(event, name) if name in names else None

    if isinstance(event, Cleared):
        return AllBlocksCleared()
    tier, group = TIERS[field("medium")], field("group_idx") or 0
    if isinstance(event, Removed):
        return BlockRemoved(block_hashes=plain_hashes(event.block_hashes), tier=tier, group=group)
    parent = event.parent_block_hash
    lora = field("lora_name") or ("7" if event.lora_id == 7 else None)
    salt = field("cache_salt") if parent is None else None
    return BlockStored(
        block_hashes=plain_hashes(event.block_hashes),
        parent_block_hash=None if parent is None else plain_hash(parent),
        token_ids=plain_tokens([token for token in event.token_ids if isinstance(token, int)]),
        block_size=event.block_size,
        lora=lora,
        tier=tier,
        group=group,
        extra_keys=event_extra_keys(
            field("extra_keys"), block_count=len(event.block_hashes), lora=lora, root_salt=salt
        ),
    )


@pytest.mark.parametrize("form", WireForm)
@given(events=st.lists(wire_events, max_size=5), rank=st.none() | st.integers(0, 9))
def test_every_form_is_read_back(form: WireForm, events: list[WireEvent], rank: int | None) -> None:
    batch = decode_batch(encode_batch(form, ts=2.5, events=events, dp_rank=rank))
    assert batch.events == tuple(meaning(form, event) for event in events)
    assert batch.positions == tuple(range(len(events)))
    assert (batch.rejected, batch.ignored, batch.ts, batch.dp_rank) == ((), 0, 2.5, rank)


CAPTURED_FORMS = [
    (WireForm.ARRAYS_0_9, "core/v0.9.2.jsonl"),
    (WireForm.ARRAYS_0_17, "core/v0.17.1.jsonl"),
    (WireForm.ARRAYS_0_22, "core/v0.23.0.jsonl"),
    (WireForm.MAPS_0_30, "v0.32.0/pub.jsonl"),
    (WireForm.MAPS_0_33, "core/v0.33.0.jsonl"),
]


@pytest.mark.parametrize(("form", "name"), CAPTURED_FORMS, ids=lambda value: str(value))
def test_a_form_is_byte_for_byte_what_its_release_published(form: WireForm, name: str) -> None:
    """The engine's own frame, taken apart into plain fields and put together again."""
    kinds: dict[str, type[Stored | Removed | Cleared]] = {
        "BlockStored": Stored,
        "BlockRemoved": Removed,
        "AllBlocksCleared": Cleared,
    }
    for frames in read_frames(CAPTURES / name):
        ts, raw_events, rank = msgspec.msgpack.decode(frames[-1])
        events: list[WireEvent] = []
        for raw in raw_events:
            if isinstance(raw, list):
                tag, *values = raw
                names = form.value.stored if tag == "BlockStored" else form.value.removed
                fields = dict(zip(names, values, strict=False))
            else:
                fields = dict(raw)
                tag = fields.pop("type")
            events.append(kinds[tag](**fields))
        assert encode_batch(form, ts=ts, events=events, dp_rank=rank) == frames[-1]


def test_pairs_and_raw_events_can_be_published() -> None:
    """For tests of what an indexer must survive."""
    pairs = Stored(block_hashes=[1], token_ids=[[1, 2], [2, 3]], block_size=2)
    odd = msgspec.Raw(msgspec.msgpack.encode({"type": "Later"}))
    batch = decode_batch(encode_batch(WireForm.SGLANG_MAPS, ts=0.0, events=[pairs, odd, Cleared()]))
    assert [fault.reason for fault in batch.rejected] == [Reject.TOKEN_PAIRS, Reject.UNKNOWN_TYPE]
    assert batch.positions == (2,)


# -- no bytes break the reader


def read_anything(payload: bytes) -> None:
    try:
        batch = decode_batch(payload, block_size=16)
    except UnreadableBatch:
        return
    assert len(batch.events) == len(batch.positions)
    assert {fault.reason for fault in batch.rejected} <= set(Reject)
    for event in batch.events:
        if isinstance(event, BlockStored):
            assert len(event.block_hashes) == 8 * event.block_count > 0
            assert len(event.token_ids) in (0, 4 * event.block_size * event.block_count)
            assert event.extra_keys is None or len(event.extra_keys) == event.block_count


@given(st.binary(max_size=200))
def test_any_bytes(payload: bytes) -> None:
    read_anything(payload)
    read_anything(b"\x93\xcb" + bytes(8) + payload)
    read_anything(b"\x93\xc0\x91" + payload + b"\xc0")


FRAMES = [
    frames[-1]
    for _, name in CAPTURED_FORMS
    for frames in list(read_frames(CAPTURES / name))[:40:4]
    if len(frames[-1]) < 1_500
]


@given(st.sampled_from(FRAMES), st.data())
def test_damaged_frames(frame: bytes, data: st.DataObject) -> None:
    damaged = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        length = data.draw(st.sampled_from([0, 1, 1, 1, 2, 8]))
        interesting = st.sampled_from(
            b"\xc0\xc1\xc4\xc7\xca\xcb\xcf\xd3\xd9\xdc\xdd\xde\xdf\x80\x90\xa0\x7f\xff"
        )
        damaged[at : at + length] = bytes(data.draw(st.lists(interesting | st.integers(0, 255), max_size=3)))
        if not damaged:
            break
    read_anything(bytes(damaged))


JSON_BODY = msgspec.json.encode(
    {"pod": "p", "seq": 3, "events": [msgspec.msgpack.decode(frame)[1][0] for frame in FRAMES[-3:]]}
)


@given(st.data())
def test_damaged_json(data: st.DataObject) -> None:
    damaged = bytearray(JSON_BODY)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        characters = st.sampled_from(b'[]{},:"\\-+.eE0179ntfu \xff\x00')
        length = data.draw(st.integers(0, 3))
        damaged[at : at + length] = bytes(data.draw(st.lists(characters, max_size=3)))
    try:
        post = decode_event_post(bytes(damaged))
    except UnreadableBatch:
        return
    batch = decode_json_events(post)
    assert {fault.reason for fault in batch.rejected} <= set(Reject)
