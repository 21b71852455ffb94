"""The fields of one event, each read by name and checked: what is acceptable in one is decided here only.

Every reader takes the raw fields and gives the value in the form of app.events, or raises Rejected with a
reason of `Reject` and the field's name.
"""

from __future__ import annotations

import array
import enum
from collections.abc import Mapping

from app import _native
from app.errors import InvalidInput
from app.events import RejectedEvent, Tier
from app.extra_keys import event_extra_keys
from app.ingest.wire_notation import KEY_BYTES_MAX, Malformed, Notation, Raw, Scalar

BLOCK_SIZE_MAX = 65_536
GROUP_MAX = 65_535
COPIES_MAX = 2**32 - 1
TEXT_MAX = 1_024  # characters of an adapter's name or a salt

Fields = Mapping[str, Raw]


class Reject(enum.StrEnum):
    """Why an event was skipped: the complete set of `RejectedEvent.reason`, fit for a metric label."""

    UNREADABLE = "unreadable"  # neither an array nor a map of fields
    UNKNOWN_TYPE = "unknown_type"  # a tag of no known event
    MISSING_FIELD = "missing_field"
    BAD_FIELD = "bad_field"  # a field of the wrong type or out of its range
    BAD_HASH = "bad_hash"  # an engine hash that is no 64-bit integer and no bytes
    BAD_TOKEN = "bad_token"  # a token id outside 0..2^32-1
    TOKEN_PAIRS = "token_pairs"  # EAGLE bigram pages: a prefix of pairs is no prefix of a prompt
    BAD_EXTRA_KEYS = "bad_extra_keys"
    BLOCK_SIZE = "block_size"  # not a block size, or not the pod's
    LENGTH_MISMATCH = "length_mismatch"  # the tokens are not block_size a block
    UNKNOWN_MEDIUM = "unknown_medium"


class Rejected(InvalidInput):
    """Ends the decoding of one event; never leaves the codec."""

    def __init__(self, reason: Reject, detail: str, *, field: str = "") -> None:
        super().__init__(f"{field}: {detail}" if field else detail, field=field)
        self.reason = reason

    def at(self, index: int) -> RejectedEvent:
        """What the batch says of it."""
        return RejectedEvent(index=index, reason=self.reason.value, detail=self.detail)


# `medium` in lower case; absent means gpu.
TIERS: Mapping[str, Tier] = {
    **dict.fromkeys(("gpu", "device", "hbm"), Tier.GPU),
    **dict.fromkeys(("cpu", "cpu_pinned", "host"), Tier.CPU),
    **dict.fromkeys(("storage", "fs", "disk", "ssd", "nvme"), Tier.DISK),
    **dict.fromkeys(("external", "obj", "object", "remote", "s3"), Tier.EXTERNAL),
}


def read_scalar(notation: Notation, fields: Fields, name: str) -> Scalar:
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return notation.scalar(raw)
    except Malformed as error:
        raise Rejected(Reject.BAD_FIELD, "not a plain value", field=name) from error


def read_text(notation: Notation, fields: Fields, name: str) -> str | None:
    value = read_scalar(notation, fields, name)
    if value is None or (isinstance(value, str) and len(value) <= TEXT_MAX):
        return value
    raise Rejected(Reject.BAD_FIELD, f"not text of at most {TEXT_MAX} characters", field=name)


def read_group(notation: Notation, fields: Fields) -> int:
    value = read_scalar(notation, fields, "group_idx")
    if value is None:
        return 0
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= GROUP_MAX:
        return value
    raise Rejected(Reject.BAD_FIELD, f"not an integer from 0 to {GROUP_MAX}", field="group_idx")


def read_size(notation: Notation, fields: Fields) -> int:
    """Tokens a block; 0 is what a placeholder has."""
    _required(fields, "block_size")
    value = read_scalar(notation, fields, "block_size")
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= BLOCK_SIZE_MAX:
        return value
    raise Rejected(Reject.BLOCK_SIZE, f"not an integer from 0 to {BLOCK_SIZE_MAX}", field="block_size")


def read_hashes(notation: Notation, fields: Fields, name: str = "block_hashes") -> bytes:
    raw = _required(fields, name)
    try:
        return notation.hashes(raw)
    except _native.WireError as error:
        raise Rejected(Reject.BAD_HASH, str(error), field=name) from error


def read_copies(notation: Notation, fields: Fields) -> bytes | None:
    """uint64, one a block."""
    raw = fields.get("copies")
    if raw is None or bytes(raw) == notation.null:
        return None
    try:
        copies = notation.hashes(raw)
    except _native.WireError as error:
        raise Rejected(Reject.BAD_FIELD, str(error), field="copies") from error
    if not all(1 <= count <= COPIES_MAX for count in array.array("Q", copies)):
        raise Rejected(Reject.BAD_FIELD, f"not an integer from 1 to {COPIES_MAX}", field="copies")
    return copies


def read_parent(notation: Notation, fields: Fields) -> int | None:
    raw = fields.get("parent_block_hash")
    if raw is None or bytes(raw) == notation.null:
        return None
    try:
        return notation.hash(raw)
    except _native.WireError as error:
        detail = str(error).replace("element 0", "the value")
        raise Rejected(Reject.BAD_HASH, detail, field="parent_block_hash") from error


def read_span(notation: Notation, fields: Fields, name: str, bytes_max: int) -> bytes | None:
    """The value as it came: whoever wants it reads it. Past `bytes_max` it is empty, and so no value."""
    raw = fields.get(name)
    if raw is None:
        return None
    span = bytes(raw)
    if span == notation.null:
        return None
    return span if len(span) <= bytes_max else b""


def read_token_ids(notation: Notation, fields: Fields) -> bytes:
    raw = _required(fields, "token_ids")
    try:
        return notation.token_ids(raw)
    except _native.WireError as error:
        reason = Reject.TOKEN_PAIRS if error.fault == "nested_array" else Reject.BAD_TOKEN
        raise Rejected(reason, str(error), field="token_ids") from error


def read_tier(notation: Notation, fields: Fields) -> Tier:
    medium = read_text(notation, fields, "medium")
    if medium is None:
        return Tier.GPU
    tier = TIERS.get(medium.lower())
    if tier is None:
        raise Rejected(Reject.UNKNOWN_MEDIUM, f"no tier is known for {medium[:64]!r}", field="medium")
    return tier


def read_lora(notation: Notation, fields: Fields) -> str | None:
    """The adapter's name, or its number where a release publishes no name."""
    name = read_text(notation, fields, "lora_name")
    if name:
        return name
    number = read_scalar(notation, fields, "lora_id")
    if isinstance(number, (bool, float)) or (isinstance(number, str) and len(number) > TEXT_MAX):
        raise Rejected(Reject.BAD_FIELD, "neither an integer nor a name", field="lora_id")
    return None if number is None or number in (-1, "") else str(number)


def read_extra_keys(
    notation: Notation, fields: Fields, block_count: int, *, is_root: bool
) -> tuple[bytes, ...] | None:
    raw = fields.get("extra_keys")
    salt = read_text(notation, fields, "cache_salt") if is_root else None
    if raw is None and not salt:
        return None
    if raw is not None and memoryview(raw).nbytes > KEY_BYTES_MAX:
        raise Rejected(Reject.BAD_EXTRA_KEYS, f"more than {KEY_BYTES_MAX} bytes", field="extra_keys")
    # Only a name stands before the other keys: a number as text could be a salt.
    lora = read_text(notation, fields, "lora_name") or None
    try:
        key_lists = None if raw is None else notation.key_lists(raw)
        return event_extra_keys(key_lists, block_count=block_count, lora=lora, root_salt=salt)
    except InvalidInput as error:
        raise Rejected(Reject.BAD_EXTRA_KEYS, error.detail, field=error.field) from error
    except Malformed as error:
        raise Rejected(Reject.BAD_EXTRA_KEYS, str(error), field="extra_keys") from error


def _required(fields: Fields, name: str) -> Raw:
    raw = fields.get(name)
    if raw is None:
        raise Rejected(Reject.MISSING_FIELD, "missing", field=name)
    return raw
