"""The wire codec of KV events, both directions: bytes in, app.events out, and back. Pure: no sockets.

What is read, in one decoder and without being told the release:
    vLLM 0.9 to 0.23        events as arrays, to which each release appended; [ts, events, rank] around them
    vLLM 0.24 and later     events as maps with a tag, in the same array or in a map
    SGLang                  arrays, later maps; pages of one token; `cache_salt` as a field of its own
    LMCache                 chunks of 256 tokens on another medium, in the stream of the vLLM around it
    JSON                    the body of POST /v1/events
Any mixture, unknown fields and unknown tags pass; engine hashes are int64, uint64 or bytes.

One event that cannot be read is skipped with a reason of `Reject`, and its batch goes on. Bytes that are no
batch raise UnreadableBatch, and nothing else is ever raised, whatever the bytes.

    wire_notation   msgpack and JSON behind one face
    wire_fields     one event's fields: what is acceptable, and the reasons for rejecting
    wire_decode     msgpack batches; events from either notation
    wire_payload    msgpack batches, natively where they are the usual ones
    wire_json       the JSON body
    wire_encode     what an engine of each release would publish
    wire_frames     ZMQ frames: live, replay request, replay reply
"""

from __future__ import annotations

from app.ingest.wire_encode import Cleared, EngineHash, Removed, Stored, WireEvent, WireForm, encode_batch
from app.ingest.wire_fields import Reject
from app.ingest.wire_frames import (
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
from app.ingest.wire_json import EventPost, decode_event_post, decode_json_events
from app.ingest.wire_payload import decode_batch, plain_batch

__all__ = [
    "END_SEQ",
    "Cleared",
    "EngineHash",
    "EventPost",
    "Message",
    "Reject",
    "Removed",
    "Stored",
    "WireEvent",
    "WireForm",
    "build_live",
    "build_replay_end",
    "build_replay_reply",
    "build_replay_request",
    "decode_batch",
    "decode_event_post",
    "decode_json_events",
    "encode_batch",
    "parse_live",
    "parse_replay_reply",
    "parse_replay_request",
    "plain_batch",
]
