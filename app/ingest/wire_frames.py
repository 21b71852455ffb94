"""ZMQ frames of the event stream and of its replay (vllm/distributed/kv_events.py): apart and together.

    live            [topic, seq, payload]           PUB to SUB
    replay request  [b"", seq]                      DEALER to ROUTER, which sees an identity in front
    replay reply    [b"", seq, payload]             up to vLLM 0.25
                    [b"", topic, seq, payload]      from 0.26 on, and SGLang
    end of replay   the same with END_SEQ and an empty payload

A sequence number is 8 bytes, big-endian. Replies are read from the right, where both forms agree.
Everything that has another shape raises UnreadableBatch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from app.errors import UnreadableBatch

END_SEQ = 2**64 - 1


class Message(msgspec.Struct, frozen=True):
    """One published batch; `topic` is empty where the form has none."""

    seq: int
    payload: bytes
    topic: bytes = b""

    @property
    def is_end(self) -> bool:
        """The marker that ends a replay."""
        return self.seq == END_SEQ and not self.payload


def build_live(message: Message) -> list[bytes]:
    return [message.topic, _seq_frame(message.seq), message.payload]


def parse_live(frames: Sequence[bytes]) -> Message:
    if len(frames) != 3:
        raise UnreadableBatch(f"a live message has 3 frames, not {len(frames)}")
    return _message(frames)


def build_replay_request(first_seq: int) -> list[bytes]:
    """As a DEALER sends it: every batch from `first_seq` on."""
    return [b"", _seq_frame(first_seq)]


def parse_replay_request(frames: Sequence[bytes]) -> tuple[bytes, int]:
    """As a ROUTER receives it: the asker's identity and the first sequence number."""
    if len(frames) != 3 or frames[1]:
        raise UnreadableBatch("a replay request is an identity, an empty frame and a sequence number")
    return frames[0], _seq_of(frames[2])


def build_replay_reply(message: Message, *, with_topic: bool) -> list[bytes]:
    """Without the identity that a ROUTER puts in front."""
    topic = [message.topic] if with_topic else []
    return [b"", *topic, _seq_frame(message.seq), message.payload]


def build_replay_end(*, with_topic: bool) -> list[bytes]:
    return build_replay_reply(Message(END_SEQ, b""), with_topic=with_topic)


def parse_replay_reply(frames: Sequence[bytes]) -> Message:
    """A batch or the end marker, in either form."""
    if len(frames) not in (3, 4) or frames[0]:
        raise UnreadableBatch(
            "a replay reply is an empty frame, perhaps a topic, a sequence number and a payload"
        )
    return _message(frames[1:])


def _message(frames: Sequence[bytes]) -> Message:
    *topic, seq, payload = frames
    return Message(_seq_of(seq), payload, topic[0] if topic else b"")


def _seq_frame(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


def _seq_of(frame: bytes) -> int:
    if len(frame) != 8:
        raise UnreadableBatch(f"a sequence number has 8 bytes, not {len(frame)}")
    return int.from_bytes(frame, "big")
