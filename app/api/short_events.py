"""`POST /v1/events` on the short way: an envelope and events in JSON, or the payload of an engine.

The events themselves are decoded by the codec of the long way; what is saved is the framework, the models
and, in JSON, a second pass over the arrays. See app/api/short_way.py.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Awaitable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from app import _native
from app.api import bodies
from app.api.events import apply_batch, decode_payload, digest_of, known_block_size
from app.api.wiring import Wiring
from app.errors import UnreadableBatch
from app.events import Envelope
from app.ingest.wire_decode import decode_events
from app.ingest.wire_notation import cut_json
from app.schemas.fields import DP_RANK_MAX, NAME_CHARS_MAX
from app.service import IndexerService

SEQ_MAX = 2**63 - 1  # a larger one is for the long way
COMMAS_MAX = 262_144  # of an envelope without its arrays, and so of the values that are built for it
_SEQ_DIGITS_MAX = 18  # and so less than SEQ_MAX
QUERY_BYTES_MAX = 2_048
_PLAINLY_TOLD = (
    b'{"accepted":%d,"stored_blocks":%d,"removed_blocks":%d,"orphans":%d,'
    b'"ignored":0,"rejected":[],"duplicate":false}'
)

_Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing here that EventsFields would refuse."""

    pod: _Name
    events: list[msgspec.Raw]
    dp_rank: Annotated[int, Meta(ge=0, le=DP_RANK_MAX)] = 0
    model: _Name | None = None
    lora: Annotated[str, Meta(max_length=NAME_CHARS_MAX)] | None = None
    seq: Annotated[int, Meta(ge=0, le=SEQ_MAX)] | None = None
    ts: Annotated[float, Meta(ge=0)] | None = None
    owner: _Name | None = None


_decoder = msgspec.json.Decoder(_Body)


def answer(
    wiring: Wiring, notation: str, query_string: bytes, body: bytes | memoryview
) -> bytes | Awaitable[bytes] | None:
    """None: for the long way, with nothing changed. Raises IndexerError where the batch itself is refused."""
    if notation == bodies.JSON and not query_string:
        return _from_json(wiring, body)
    if notation == bodies.MSGPACK:
        return _from_payload(wiring, query_string, body)
    return None


def _from_json(wiring: Wiring, body: bytes | memoryview) -> bytes | Awaitable[bytes] | None:
    events_max = wiring.settings.events_max
    service = wiring.writer.immediate
    plain = None if service is None else wiring.plain.read_json(body, events_max)
    if service is not None and plain is not None:
        pod, model, lora, dp_rank, seq, ts = plain
        told = _apply_plain(wiring, service, pod, model, dp_rank, seq, lora, ts)
        if told is not None:
            return told
    cut = _native.json_cut(body, len(body), 2 * events_max)
    if cut is None:
        return None
    rest, arrays = cut
    if b'"metadata"' in rest:  # kept as it came, and an array in it may have been cut out
        return None
    said = bodies.decode_rest(_decoder, rest, COMMAS_MAX)
    if (
        said is None
        or len(said.events) > events_max
        or not _plain(said.pod, said.model, said.lora, said.owner)
    ):
        return None
    if said.ts is not None and not math.isfinite(said.ts):
        return None
    batch = decode_events(
        cut_json(arrays),
        said.events,
        ts=said.ts,
        dp_rank=said.dp_rank,
        block_size=known_block_size(wiring.service, said.pod, said.dp_rank),
    )
    envelope = Envelope(
        pod=said.pod,
        model=said.model,
        dp_rank=said.dp_rank,
        seq=said.seq,
        lora=said.lora or None,
        digest=digest_of(said.seq, body),
        owner=said.owner,
    )
    return _told(apply_batch(wiring, envelope, batch))


def _from_payload(
    wiring: Wiring, query_string: bytes, body: bytes | memoryview
) -> bytes | Awaitable[bytes] | None:
    said = _read_query(query_string)
    if said is None:
        return None
    pod, model, lora, dp_rank, seq, owner = said
    service = wiring.writer.immediate
    plain = None if owner or service is None else wiring.plain.read_msgpack(body, wiring.settings.events_max)
    if service is not None and plain is not None:
        ts, rank = plain
        own_rank = (rank or 0) if dp_rank is None else dp_rank
        told = _apply_plain(wiring, service, pod, model, own_rank, seq, lora, ts)
        if told is not None:
            return told
    try:
        batch = decode_payload(wiring.service, body, pod, dp_rank)
    except UnreadableBatch:
        return None
    if len(batch.events) + len(batch.rejected) + batch.ignored > wiring.settings.events_max:
        return None
    envelope = Envelope(
        pod=pod,
        model=model,
        dp_rank=(batch.dp_rank or 0) if dp_rank is None else dp_rank,
        seq=seq,
        lora=lora,
        digest=digest_of(seq, body),
        owner=owner,
    )
    return _told(apply_batch(wiring, envelope, batch))


def _apply_plain(
    wiring: Wiring,
    service: IndexerService,
    pod: str,
    model: str | None,
    dp_rank: int,
    seq: int | None,
    lora: str | None,
    ts: float | None,
) -> bytes | None:
    """What is answered to the batch that `wiring.plain` has read. None: nothing has changed, it needs the general way."""
    result = service.post_plain(pod, wiring.plain, model=model, dp_rank=dp_rank, seq=seq, lora=lora, ts=ts)
    if result is None:
        return None
    if ts is not None:
        wiring.metrics.observe_lag(time.time() - ts)
    return _PLAINLY_TOLD % (
        result.accepted,
        result.stored_blocks,
        result.removed_blocks,
        result.orphans,
    )


def _told(result: dict[str, Any] | Awaitable[dict[str, Any]]) -> bytes | Awaitable[bytes]:
    return msgspec.json.encode(result) if isinstance(result, dict) else _told_later(result)


async def _told_later(result: Awaitable[dict[str, Any]]) -> bytes:
    return msgspec.json.encode(await result)


_KNOWN = frozenset({"pod", "model", "lora", "dp_rank", "owner"})

# Pod, model, adapter, rank, number, owner.
_Said = tuple[str, str | None, str | None, int | None, int | None, str | None]


def _read_query(query_string: bytes) -> _Said | None:
    """None where it takes more to read them.

    Nothing but the number changes from one batch of an engine to the next: the rest is remembered.
    """
    if len(query_string) > QUERY_BYTES_MAX:
        return None
    if b"seq=" not in query_string:
        return _read_fields(query_string)
    before, mark, rest = query_string.partition(b"&seq=")
    digits, more, behind = rest.partition(b"&")
    if mark and (not digits.isdigit() or len(digits) > _SEQ_DIGITS_MAX):
        return None
    seq = int(digits) if mark else None
    said = _read_fields(before + more + behind)
    if said is None:
        return None
    pod, model, lora, dp_rank, _, owner = said
    return pod, model, lora, dp_rank, seq, owner


@functools.lru_cache(maxsize=1_024)
def _read_fields(query_string: bytes) -> _Said | None:
    """Parameters that need no decoding, each at most once, and no number among them."""
    if b"%" in query_string or b"+" in query_string or not query_string.isascii():
        return None
    fields: dict[str, str] = {}
    for part in query_string.decode("ascii").split("&"):
        name, _, value = part.partition("=")
        if name not in _KNOWN or name in fields or not value:
            return None
        fields[name] = value
    pod, model, lora = fields.get("pod"), fields.get("model"), fields.get("lora")
    rank, owner = fields.get("dp_rank", "0"), fields.get("owner")
    if pod is None or not _plain(pod, model, lora, owner):
        return None
    if not rank.isdigit() or len(rank) > _SEQ_DIGITS_MAX or int(rank) > DP_RANK_MAX:
        return None
    return pod, model, lora, int(rank) if "dp_rank" in fields else None, None, owner


def _plain(*names: str | None) -> bool:
    """Surely names that the long way takes."""
    # No generator: with three names it costs as much as all else that is said of the envelope.
    return not [
        name
        for name in names
        if name is not None and not (name.isprintable() and len(name) <= NAME_CHARS_MAX)
    ]
