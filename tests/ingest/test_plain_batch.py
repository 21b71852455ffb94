"""What is read natively as a whole cannot be told from what the plain decoders read, whatever the bytes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api import short_events
from app.events import BlockRemoved, BlockStored, Event, EventBatch, Tier
from app.ingest import wire_decode
from app.ingest.vllm import plain_batch
from app.ingest.wire_notation import JSON
from tests.captures import read_frames
from tests.ingest.test_wire_payload import CAPTURED, batches, events, odd, stored

EVENTS_MAX = 4
PLAIN = plain_batch()  # one for all, as a server has it: nothing of a batch may be left for the next


def events_read() -> tuple[Event, ...]:
    _, stores, tier, block_size, lora, offloads = PLAIN.kind()
    read: list[Event] = []
    for event in PLAIN.events():
        if len(event) == 3:
            read.append(BlockRemoved(tier=Tier(event[0]), group=event[1], block_hashes=event[2]))
            continue
        _, group, hashes, parent, tokens = event
        assert event[0] == tier
        read.append(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=parent,
                token_ids=tokens,
                block_size=block_size,
                lora=lora,
                tier=Tier(tier),
                group=group,
            )
        )
    assert stores == sum(isinstance(event, BlockStored) for event in read)
    assert offloads == any(
        event.tier is not Tier.GPU for event in read if isinstance(event, BlockStored | BlockRemoved)
    )
    return tuple(read)


def is_same(batch: EventBatch) -> None:
    assert (batch.rejected, batch.ignored) == ((), 0)
    assert batch.events == events_read()


def own_size() -> int | None:
    """The block size that the pod of such a batch must have."""
    _, stores, _, block_size, _, _ = PLAIN.kind()
    return block_size if stores else None


def reads_payload(payload: bytes) -> bool:
    said = PLAIN.read_msgpack(payload, EVENTS_MAX)
    if said is None:
        assert PLAIN.events() == []
        return False
    batch = wire_decode.decode_batch(payload, block_size=own_size())
    assert said == (batch.ts, batch.dp_rank)
    is_same(batch)
    return True


def reads_json(body: bytes) -> bool:
    said = PLAIN.read_json(body, EVENTS_MAX)
    if said is None:
        assert PLAIN.events() == []
        return False
    post = short_events._decoder.decode(body)
    assert said == (post.pod, post.model, post.lora, post.dp_rank, post.seq, post.ts)
    assert post.owner is None
    assert len(post.events) <= EVENTS_MAX
    is_same(
        wire_decode.decode_events(JSON, post.events, ts=post.ts, dp_rank=post.dp_rank, block_size=own_size())
    )
    return True


# -- they are taken

REMOVED = {"type": "BlockRemoved", "block_hashes": [1, 2], "medium": "GPU"}
USUAL: dict[str, list[Any]] = {
    "stored": [stored(3, 4)],
    "stored and removed": [stored(3, 4), REMOVED, stored(2, 4), {**REMOVED, "medium": "CPU"}],
    "of an adapter": [stored(2, 4, lora_name="sql", lora_id=7), stored(1, 4, lora_name="sql")],
    "offloaded": [stored(2, 4, medium="cpu"), stored(1, 4, medium="Host", group_idx=1)],
    "a child": [stored(1, 4, parent_block_hash=-5)],
    "keys of nulls": [stored(3, 4, extra_keys=[None] * 3, kv_cache_spec_kind="full_attention")],
    "nothing but what must be": [
        {"type": "BlockStored", "block_hashes": [7], "token_ids": [1, 2], "block_size": 2}
    ],
    "long": [stored(256, 16)],
}
UNUSUAL: dict[str, list[Any]] = {
    "no events": [],
    "too many events": [REMOVED] * (EVENTS_MAX + 1),
    "an empty removal": [{**REMOVED, "block_hashes": []}],
    "two adapters": [stored(1, 4, lora_name="a"), stored(1, 4, lora_name="b")],
    "two tiers": [stored(1, 4), stored(1, 4, medium="CPU")],
    "two block sizes": [stored(1, 4), stored(1, 8)],
    "no medium of ours": [stored(1, 4, medium="moon")],
    "a group that is not indexed": [stored(1, 4, kv_cache_spec_kind="mamba")],
    "extra keys": [stored(2, 4, extra_keys=[["salt"], None])],
    "too few keys": [stored(2, 4, extra_keys=[None])],
    "a salt": [stored(1, 4, cache_salt="s")],
    "metadata": [stored(1, 4, metadata={"a": 1})],
    "a number for an adapter": [stored(1, 4, lora_id=7)],
    "a placeholder": [{"type": "BlockStored", "block_hashes": [7], "token_ids": [], "block_size": 0}],
    "a clear": [{"type": "AllBlocksCleared"}],
    "beside a clear": [stored(1, 4), {"type": "AllBlocksCleared"}],
    "an adapter beyond ASCII": [stored(1, 4, lora_name="\u00fc")],
    "tokens that are none": [stored(1, 4, token_ids=[1, 2, 3, -4])],
    "too few tokens": [stored(2, 4, token_ids=[1, 2, 3])],
    "no event": [5],
}


def body_of(told: Any, **more: Any) -> bytes:
    return json.dumps({"pod": "a", "events": told, **more}, default=bytes.hex).encode()


@pytest.mark.parametrize("name", USUAL)
def test_usual_batches_are_taken(name: str) -> None:
    assert reads_payload(msgspec.msgpack.encode([1.5, USUAL[name], 3]))
    assert reads_payload(msgspec.msgpack.encode([None, USUAL[name]]))
    no_time = msgspec.msgpack.encode([-1.5, USUAL[name]])
    assert not reads_payload(no_time), "the plain decoder says what that is"
    assert reads_json(body_of(USUAL[name], model="m", lora="", dp_rank=2, seq=5, ts=1.25, owner=None))
    assert reads_json(body_of(USUAL[name]))


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_batches_are_not(name: str) -> None:
    assert not reads_payload(msgspec.msgpack.encode([1.5, UNUSUAL[name], 3]))
    assert not reads_json(body_of(UNUSUAL[name]))


@pytest.mark.parametrize("path", CAPTURED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_captured_payloads(path: Any) -> None:
    for frames in read_frames(path):
        reads_payload(frames[-1])


def test_a_payload_past_the_bound_is_refused() -> None:
    tokens = [150_000] * (PLAIN.BYTES_MAX // 5)
    told = {"type": "BlockStored", "block_hashes": [1], "token_ids": tokens, "block_size": len(tokens)}
    payload = msgspec.msgpack.encode([1.5, [told]])
    assert len(payload) > PLAIN.BYTES_MAX
    assert not reads_payload(payload)
    told = {**told, "token_ids": tokens[:-40], "block_size": len(tokens) - 40}
    payload = msgspec.msgpack.encode([1.5, [told]])
    assert PLAIN.BYTES_MAX > len(payload) > PLAIN.BYTES_MAX * 0.99
    assert reads_payload(payload)


def test_numbers_that_take_a_byte_have_room() -> None:
    """Hashes of one byte become eight, and short arrays are rounded up."""
    told: list[dict[str, Any]] = [
        {"type": "BlockRemoved", "block_hashes": [5] * count} for count in (30_000, 1, 1, 60_000)
    ]
    assert reads_payload(msgspec.msgpack.encode([1.5, told]))
    told = [{**event, "block_hashes": event["block_hashes"][::2]} for event in told]
    assert reads_json(body_of(told).replace(b" ", b""))


@pytest.mark.parametrize(
    "envelope",
    [
        b'{"pod":"a","events":[%b]} x',
        b'{"pod":"a","pod":"a","events":[%b]}',
        b'{"pod":"","events":[%b]}',
        b'{"pod":"\\u0061","events":[%b]}',
        b'{"pod":"a\x7f","events":[%b]}',
        b'{"pod":null,"events":[%b]}',
        b'{"pod":"a","events":[%b],}',
        b'{"pod":"a","events":[%b,]}',
        b'{"pod":"a" "events":[%b]}',
        b'{"events":[%b]}',
        b'{"pod":"a"}',
        b'{"pod":"a","events":[%b],"more":1}',
        b'{"pod":"a","events":[%b],"model":""}',
        b'{"pod":"a","events":[%b],"owner":"o"}',
        b'{"pod":"a","events":[%b],"seq":-1}',
        b'{"pod":"a","events":[%b],"seq":01}',
        b'{"pod":"a","events":[%b],"seq":9223372036854775808}',
        b'{"pod":"a","events":[%b],"dp_rank":65536}',
        b'{"pod":"a","events":[%b],"dp_rank":null}',
        b'{"pod":"a","events":[%b],"ts":1e400}',
        b'{"pod":"a","events":[%b],"ts":01.5}',
        b'{"pod":"a","events":[%b],"ts":.5}',
        b'{"pod":"a","events":[%b],"ts":1.}',
        b'{"pod":"a","events":[%b],"ts":nan}',
        b'[{"pod":"a","events":[%b]}]',
    ],
)
def test_unusual_envelopes_are_not(envelope: bytes) -> None:
    event = json.dumps(stored(1, 4)).encode()
    assert not reads_json(envelope.replace(b"%b", event))


# -- they say the same


@given(batches)
def test_payloads_are_the_same(batch: Any) -> None:
    reads_payload(msgspec.msgpack.encode(batch))


@given(batches, st.data())
def test_damaged_payloads_are_the_same(batch: Any, data: st.DataObject) -> None:
    payload = bytearray(msgspec.msgpack.encode(batch))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    del payload[data.draw(st.integers(max(1, len(payload) - 2), len(payload))) :]
    reads_payload(bytes(payload))


plain_events = st.one_of(
    st.builds(
        stored,
        st.integers(1, 3),
        st.just(2),
        medium=st.sampled_from(["GPU", None, "gpu"]),
        parent_block_hash=st.one_of(st.none(), st.integers(-(2**63), 2**64 - 1)),
        lora_name=st.sampled_from([None, ""]),
        group_idx=st.sampled_from([..., None, 0, 3]),
    ),
    st.just(REMOVED),
    events(),
)
envelopes = st.builds(
    lambda told, more: {"pod": "pod-a", "events": told, **more},
    st.lists(plain_events, max_size=4),
    st.fixed_dictionaries(
        {},
        optional={
            "model": st.one_of(st.just("m"), odd),
            "lora": st.one_of(st.sampled_from([None, "", "l"]), odd),
            "dp_rank": st.one_of(st.integers(0, 3), odd),
            "seq": st.one_of(st.integers(0, 2**63), odd),
            "ts": st.one_of(st.floats(0, 2e9), st.integers(0, 10), odd),
            "owner": st.sampled_from([None, None, "o"]),
        },
    ),
)


@given(envelopes, st.sampled_from([None, 1]), st.data())
def test_bodies_are_the_same(envelope: Any, indent: int | None, data: st.DataObject) -> None:
    body = bytearray(json.dumps(envelope, default=bytes.hex, indent=indent, ensure_ascii=False).encode())
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(body) - 1))
        piece = data.draw(
            st.sampled_from([b"", b'"', b"\\", b",", b" ", b"5", b".5", b"null", b"\xff", b":", b"}"])
        )
        body[place : place + data.draw(st.integers(0, 2))] = piece
    reads_json(bytes(body))


@given(st.binary(max_size=60))
def test_any_bytes_are_the_same(data: bytes) -> None:
    reads_payload(data)
    reads_json(data)
