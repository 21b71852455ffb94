"""Events on the wire to app.events, in either notation and in every shape that engines have used.

A batch is cut into raw spans, one an event, so that an event that cannot be read costs itself and not its
batch. Fields are found by name: the positions of the array shapes are one table, since every release only
appended to it and SGLang's arrays are a beginning of vLLM's. A field that is not asked for is never parsed.

An event comes out as an event of app.events; or ignored, when it is well-formed and says nothing about a
reusable prefix; or rejected, with a reason of `Reject`. Decoding keeps no state: a removal in a group that is
not indexed comes out like any other and finds nothing at the index, where residency is kept by (tier, group).

Memory is a small multiple of the input: nothing is believed of a declared length or a nesting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from app import _native
from app.errors import UnreadableBatch
from app.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    PrefixesStored,
    RejectedEvent,
    Tier,
)
from app.ingest.wire_fields import (
    Fields,
    Reject,
    Rejected,
    read_copies,
    read_extra_keys,
    read_group,
    read_hashes,
    read_lora,
    read_parent,
    read_scalar,
    read_size,
    read_span,
    read_text,
    read_tier,
    read_token_ids,
)
from app.ingest.wire_notation import CHILDREN_MAX, MSGPACK, Malformed, Notation, Raw, Scalar

RANK_MAX = 65_535
METADATA_BYTES_MAX = 65_536  # of a block; `hint_bytes_max` bounds what is kept of it
HINTS_BYTES_MAX = 16 * 1024 * 1024  # of a line of a dump
OWNERS_BYTES_MAX = 16 * 1024 * 1024  # likewise

_RANK_FIELDS = ("data_parallel_rank", "attn_dp_rank", "dp_rank")  # of a batch that is a map

# Field order of the array shapes, at its longest (vLLM 0.23).
_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
)
_PREFIXES_FIELDS = (
    "block_hashes",
    "prefix_hashes",
    "block_size",
    "copies",
    "lora_name",
    "medium",
    "group_idx",
    "hints",
    "owners",
)  # ours, of a dump
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_CLEARED_FIELDS = ("medium",)

# Cache groups whose blocks cover all their tokens. In the others (sliding window, state space, cross
# attention) a stored block does not mean that its prefix can be reused.
INDEXABLE_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})


def decode_batch(payload: bytes | memoryview, *, block_size: int | None = None) -> EventBatch:
    """What app/ingest/wire_payload.py does faster, in every form and by this module alone."""
    try:
        batch = _native.msgpack_grandchildren(payload, CHILDREN_MAX)
    except _native.WireError as error:
        raise UnreadableBatch(f"not a batch of events in msgpack: {error}") from error
    ts: object
    rank: object
    if isinstance(batch, list):
        if len(batch) < 2:
            raise UnreadableBatch("a batch is an array of a time and events")
        ts, events, *rest = batch
        rank = rest[0] if rest else None
    else:
        if "events" not in batch:
            raise UnreadableBatch("a batch has events", field="events")
        ts, events = batch.get("ts"), batch["events"]
        rank = next((batch[name] for name in _RANK_FIELDS if name in batch), None)
    if not isinstance(events, list):
        raise UnreadableBatch("the events of a batch are an array", field="events")
    return decode_events(MSGPACK, events, ts=batch_ts(ts), dp_rank=batch_rank(rank), block_size=block_size)


def decode_events(
    notation: Notation,
    events: Sequence[Raw],
    *,
    ts: float | None,
    dp_rank: int | None,
    block_size: int | None,
) -> EventBatch:
    """The events of a batch, each decoded for itself."""
    decoded: list[Event] = []
    positions: list[int] = []
    rejected: list[RejectedEvent] = []
    for index, raw in enumerate(events):
        try:
            event = decode_event(notation, raw, block_size)
        except Rejected as fault:
            rejected.append(fault.at(index))
            continue
        if event is not None:
            decoded.append(event)
            positions.append(index)
    return EventBatch(
        events=tuple(decoded),
        positions=tuple(positions),
        rejected=tuple(rejected),
        ignored=len(events) - len(decoded) - len(rejected),
        ts=ts,
        dp_rank=dp_rank,
    )


def batch_ts(raw: object) -> float | None:
    """Of a raw value, None when there is none, or one that is no time. Raises UnreadableBatch."""
    value = _batch_scalar(raw, "ts")
    if value is None:
        return None
    if isinstance(value, (bool, str)):
        raise UnreadableBatch("the time of a batch is a number of seconds", field="ts")
    ts = float(value)
    return ts if math.isfinite(ts) and ts >= 0 else None


def batch_rank(raw: object) -> int | None:
    """The same."""
    value = _batch_scalar(raw, "dp_rank")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= RANK_MAX:
        raise UnreadableBatch(f"the rank of a batch is an integer from 0 to {RANK_MAX}", field="dp_rank")
    return value


def _batch_scalar(raw: object, field: str) -> Scalar:
    if raw is None:
        return None
    if not isinstance(raw, bytes):
        raise UnreadableBatch("an array or a map in the place of one value", field=field)
    try:
        return MSGPACK.scalar(raw)
    except Malformed as error:
        raise UnreadableBatch(f"not a plain value: {error}", field=field) from error


def decode_event(notation: Notation, raw: Raw, pod_block_size: int | None) -> Event | None:
    """One event. None: ignored. Raises Rejected."""
    try:
        children = notation.children(raw)
    except Malformed as error:
        raise Rejected(Reject.UNREADABLE, f"not an event: {error}") from error
    values: Sequence[Raw] = ()
    if isinstance(children, Mapping):
        fields: Fields = children
    else:
        fields = {"type": children[0]} if children else {}
        values = children[1:]
    tag = read_scalar(notation, fields, "type")
    if tag is None:
        raise Rejected(Reject.MISSING_FIELD, "missing", field="type")
    shape = _SHAPES.get(tag) if isinstance(tag, str) else None
    if shape is None:
        raise Rejected(Reject.UNKNOWN_TYPE, f"no event is called {str(tag)[:64]!r}", field="type")
    field_order, decode = shape
    if values:
        # Elements that a later release appended are left out.
        fields = dict(zip(field_order, values, strict=False))
    return decode(notation, fields, pod_block_size)


def _decode_stored(notation: Notation, fields: Fields, pod_block_size: int | None) -> BlockStored | None:
    kind = read_text(notation, fields, "kv_cache_spec_kind")
    if kind is not None and kind not in INDEXABLE_KINDS:
        return None
    hashes = read_hashes(notation, fields)
    if not hashes:
        return None
    block_count = len(hashes) // 8
    tier = read_tier(notation, fields)
    group = read_group(notation, fields)
    lora = read_lora(notation, fields)
    block_size = read_size(notation, fields)
    tokens = read_token_ids(notation, fields)
    full_blocks = block_count
    parent = None
    extra_keys = None
    # Without tokens it is a placeholder. Offload connectors put 0 or their own chunk size there.
    if tokens or (block_size != 0 and tier is Tier.GPU):
        if not _fits_pod(block_size, pod_block_size, tier):
            return None
        full_blocks = _full_blocks(len(tokens) // 4, block_count, block_size, tier)
        if full_blocks < 0 and kind is None and group > 0:
            # Releases with groups and without kinds: blocks that do not cover their tokens are of a sparse
            # group.
            return None
        if full_blocks < 0:
            detail = f"{len(tokens) // 4} tokens for {block_count} blocks of {block_size}"
            raise Rejected(Reject.LENGTH_MISMATCH, detail, field="token_ids")
        if full_blocks == 0:
            return None
        parent = read_parent(notation, fields)
        extra_keys = read_extra_keys(notation, fields, block_count, is_root=parent is None)
    return BlockStored(
        block_hashes=hashes[: full_blocks * 8],
        parent_block_hash=parent,
        token_ids=tokens[: full_blocks * block_size * 4],
        block_size=block_size,
        lora=lora,
        tier=tier,
        group=group,
        extra_keys=extra_keys[:full_blocks] if extra_keys is not None else None,
        metadata=read_span(notation, fields, "metadata", METADATA_BYTES_MAX),
    )


def _decode_prefixes(notation: Notation, fields: Fields, _: int | None) -> PrefixesStored | None:
    hashes = read_hashes(notation, fields)
    prefixes = read_hashes(notation, fields, "prefix_hashes")
    copies = read_copies(notation, fields)
    if len(prefixes) != len(hashes):
        detail = f"{len(prefixes) // 8} prefix hashes for {len(hashes) // 8} blocks"
        raise Rejected(Reject.LENGTH_MISMATCH, detail, field="prefix_hashes")
    if copies is not None and len(copies) != len(hashes):
        detail = f"{len(copies) // 8} numbers for {len(hashes) // 8} blocks"
        raise Rejected(Reject.LENGTH_MISMATCH, detail, field="copies")
    block_size = read_size(notation, fields)
    if block_size == 0:
        raise Rejected(Reject.BLOCK_SIZE, "0 tokens a block", field="block_size")
    if not hashes:
        return None
    return PrefixesStored(
        block_hashes=hashes,
        prefix_hashes=prefixes,
        block_size=block_size,
        copies=copies,
        lora=read_lora(notation, fields),
        tier=read_tier(notation, fields),
        group=read_group(notation, fields),
        hints=read_span(notation, fields, "hints", HINTS_BYTES_MAX),
        owners=read_span(notation, fields, "owners", OWNERS_BYTES_MAX),
    )


def _decode_removed(notation: Notation, fields: Fields, _: int | None) -> BlockRemoved | None:
    hashes = read_hashes(notation, fields)
    if not hashes:
        return None
    return BlockRemoved(
        block_hashes=hashes, tier=read_tier(notation, fields), group=read_group(notation, fields)
    )


def _decode_cleared(notation: Notation, fields: Fields, _: int | None) -> AllBlocksCleared:
    if read_tier(notation, fields) is not Tier.GPU:
        raise Rejected(Reject.BAD_FIELD, "an event clears the GPU tier only", field="medium")
    return AllBlocksCleared()


_SHAPES: Mapping[str, tuple[Sequence[str], Callable[[Notation, Fields, int | None], Event | None]]] = {
    "BlockStored": (_STORED_FIELDS, _decode_stored),
    "PrefixesStored": (_PREFIXES_FIELDS, _decode_prefixes),
    "BlockRemoved": (_REMOVED_FIELDS, _decode_removed),
    "AllBlocksCleared": (_CLEARED_FIELDS, _decode_cleared),
}


def _fits_pod(block_size: int, pod_block_size: int | None, tier: Tier) -> bool:
    """False: to be ignored.

    An offload tier may store chunks of several blocks. A chunk of another size is the unfinished end of a
    prompt, which LMCache publishes with its length as the block size.
    """
    if block_size == 0:
        raise Rejected(Reject.BLOCK_SIZE, "0 tokens a block", field="block_size")
    if pod_block_size is None or block_size == pod_block_size:
        return True
    if tier is Tier.GPU:
        detail = f"blocks of {block_size} tokens from a pod with blocks of {pod_block_size}"
        raise Rejected(Reject.BLOCK_SIZE, detail, field="block_size")
    return block_size % pod_block_size == 0


def _full_blocks(token_count: int, block_count: int, block_size: int, tier: Tier) -> int:
    """Blocks that have all their tokens; -1 when tokens and blocks do not belong together."""
    if token_count == block_count * block_size:
        return block_count
    short = block_count * block_size - token_count
    return block_count - 1 if tier is not Tier.GPU and 0 < short < block_size else -1
