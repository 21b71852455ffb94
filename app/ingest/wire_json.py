"""The JSON body of POST /v1/events: an envelope that is checked strictly, around events that are not.

Events stay raw text until their pod is known, because whether a block size fits depends on the pod. Thousands
of token ids then go from the text to a buffer natively. Engines add fields to events with every release, so
unknown ones there are passed over; an unknown field of the envelope is a mistake of the sender and refused.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from app.errors import UnreadableBatch
from app.events import EventBatch
from app.ingest.wire_decode import RANK_MAX, decode_events
from app.ingest.wire_notation import CHILDREN_MAX, JSON, Malformed

NAME_MAX = 512  # characters of a pod's or a model's name
SEQ_MAX = 2**64 - 2  # the last value is the end marker of a replay

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_MAX)]


class EventPost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The envelope; `events` are the raw texts, in order."""

    pod: _Name
    events: list[msgspec.Raw]
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=RANK_MAX)] = 0
    model: _Name | None = None
    seq: Annotated[int, msgspec.Meta(ge=0)] | None = None
    ts: Annotated[float, msgspec.Meta(ge=0)] | None = None


_decoder = msgspec.json.Decoder(EventPost)
_path_of_error = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")


def decode_event_post(body: bytes | memoryview) -> EventPost:
    """The envelope of the body. Raises UnreadableBatch, with the field at fault."""
    try:
        post = _decoder.decode(body)
    except Malformed as error:
        sentence = str(error)
        place = _path_of_error.search(sentence)
        field = place["path"] if place else ""
        raise UnreadableBatch(_path_of_error.sub("", sentence), field=field) from error
    if post.seq is not None and post.seq > SEQ_MAX:
        raise UnreadableBatch(f"a sequence number is at most {SEQ_MAX}", field="seq")
    if len(post.events) > CHILDREN_MAX:
        raise UnreadableBatch(f"more than {CHILDREN_MAX} events", field="events")
    return post


def decode_json_events(post: EventPost, *, block_size: int | None = None) -> EventBatch:
    """The events of the envelope; `block_size` is the pod's, in tokens, or None when it is not known yet."""
    return decode_events(JSON, post.events, ts=post.ts, dp_rank=post.dp_rank, block_size=block_size)
