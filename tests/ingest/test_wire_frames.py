"""Frames of the stream and of the replay, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import UnreadableBatch
from app.ingest.vllm import (
    END_SEQ,
    Message,
    build_live,
    build_replay_end,
    build_replay_reply,
    build_replay_request,
    parse_live,
    parse_replay_reply,
    parse_replay_request,
)

seqs = st.integers(0, 2**64 - 1)
messages = st.builds(Message, seqs, st.binary(), st.binary(max_size=8))


@given(messages)
def test_live_frames(message: Message) -> None:
    frames = build_live(message)
    assert frames == [message.topic, message.seq.to_bytes(8, "big"), message.payload]
    assert parse_live(frames) == message


@given(messages)
def test_replies_of_both_forms(message: Message) -> None:
    new = build_replay_reply(message, with_topic=True)
    old = build_replay_reply(message, with_topic=False)
    assert (len(new), len(old)) == (4, 3)
    assert parse_replay_reply(new) == message
    assert parse_replay_reply(old) == Message(message.seq, message.payload)


@given(seqs, st.binary(min_size=1))
def test_a_request_reaches_the_router_behind_an_identity(seq: int, identity: bytes) -> None:
    assert parse_replay_request([identity, *build_replay_request(seq)]) == (identity, seq)


def test_the_end_of_a_replay() -> None:
    """As captured: vLLM 0.25 and before without a topic frame, later ones with an empty one."""
    assert build_replay_end(with_topic=False) == [b"", b"\xff" * 8, b""]
    assert build_replay_end(with_topic=True) == [b"", b"", b"\xff" * 8, b""]
    for with_topic in (False, True):
        assert parse_replay_reply(build_replay_end(with_topic=with_topic)).is_end
    assert not Message(END_SEQ, b"x").is_end
    assert not Message(END_SEQ - 1, b"").is_end


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5])
def test_a_live_message_has_three_frames(count: int) -> None:
    with pytest.raises(UnreadableBatch):
        parse_live([bytes(8)] * count)


@pytest.mark.parametrize(
    "frames",
    [[], [b""], [b"", bytes(8)], [b"x", bytes(8), b""], [b"", b"", b"", bytes(8), b""], [b"", b"", b""]],
)
def test_what_is_no_reply(frames: list[bytes]) -> None:
    with pytest.raises(UnreadableBatch):
        parse_replay_reply(frames)


@pytest.mark.parametrize("frames", [[], [b"id", bytes(8)], [b"id", b"x", bytes(8)], [b"id", b"", bytes(7)]])
def test_what_is_no_request(frames: list[bytes]) -> None:
    with pytest.raises(UnreadableBatch):
        parse_replay_request(frames)


@pytest.mark.parametrize("size", [0, 7, 9])
def test_a_sequence_number_has_eight_bytes(size: int) -> None:
    with pytest.raises(UnreadableBatch):
        parse_live([b"", bytes(size), b""])
