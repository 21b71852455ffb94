"""The frames around a payload: live messages, replay requests and replay replies.

A live message is [topic, sequence number (8 bytes, big-endian), payload]. A replay reply is read from the right,
because vLLM 0.26 put a topic frame in front of the number: [b"", number, payload] before, [b"", topic, number, payload]
since. The end of a replay is the number 2^64 - 1, which no batch ever has.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.errors import InvalidInput

END_OF_REPLAY = 2**64 - 1
_SEQ_BYTES = 8


def parse_live(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """(sequence number, payload) of a message of the live stream. Raises InvalidInput."""
    if len(frames) != 3:
        raise InvalidInput(f"a live message has 3 frames, not {len(frames)}")
    seq = _sequence_number(frames[1])
    if seq == END_OF_REPLAY:
        raise InvalidInput("the number that ends a replay came on the live stream")
    return seq, frames[2]


def parse_replay(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """(sequence number, payload) of a replay reply; the number is END_OF_REPLAY at its end. Raises InvalidInput."""
    if len(frames) < 3:
        raise InvalidInput(f"a replay reply has at least 3 frames, not {len(frames)}")
    return _sequence_number(frames[-2]), frames[-1]


def replay_request(start_seq: int) -> list[bytes]:
    """What a DEALER sends to get every batch from `start_seq` on."""
    return [b"", start_seq.to_bytes(_SEQ_BYTES, "big")]


def _sequence_number(frame: bytes) -> int:
    if len(frame) != _SEQ_BYTES:
        raise InvalidInput(f"a sequence number has {_SEQ_BYTES} bytes, not {len(frame)}")
    return int.from_bytes(frame, "big")
