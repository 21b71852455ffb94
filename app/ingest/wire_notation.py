"""The two notations that events come in, msgpack and JSON, behind one face: raw spans in, small values out.

A decoder that is written once for both never sees a parsed tree. It asks for the raw children of a span, and
turns a span into a buffer of numbers (native, nothing built per number) or into one small value (msgspec).
Every function raises Malformed, with a sentence, for a span that is not what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from app import _native

Raw: TypeAlias = bytes  # the span of one value; for JSON a msgspec.Raw, which is read in the same way
Scalar: TypeAlias = bool | int | float | str | None
Malformed = (msgspec.MsgspecError, _native.WireError, RecursionError, UnicodeError)

CHILDREN_MAX = (
    262_144  # values in one array of a batch; twice the events of a 128k prompt in pages of one token
)
KEY_BYTES_MAX = 1_048_576  # of one event's `extra_keys`


class Notation(msgspec.Struct, frozen=True, kw_only=True):
    """`token_ids` and `hashes` give uint32 and uint64, little-endian."""

    name: str
    null: bytes
    children: Callable[[Raw], Sequence[Raw] | Mapping[str, Raw]]
    token_ids: Callable[[Raw], bytes]
    hashes: Callable[[Raw], bytes]
    hash: Callable[[Raw], int]
    scalar: Callable[[Raw], Scalar]
    key_lists: Callable[[Raw], list[list[Any] | None] | None]


def _msgpack_children(raw: Raw) -> Sequence[Raw] | Mapping[str, Raw]:
    return _native.msgpack_children(raw, CHILDREN_MAX)


def _msgpack_hash(raw: Raw) -> int:
    return int.from_bytes(_native.msgpack_hashes(b"\x91" + raw), "little")


def _json_hash(raw: Raw) -> int:
    return int.from_bytes(_native.json_hashes(b"[" + bytes(raw) + b"]"), "little")


_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def _json_children(raw: Raw) -> Mapping[str, Raw]:
    if _native.json_child_count(raw, CHILDREN_MAX) > CHILDREN_MAX:
        raise msgspec.ValidationError(f"more than {CHILDREN_MAX} fields")
    return _decode_fields(raw)


MSGPACK = Notation(
    name="msgpack",
    null=b"\xc0",
    children=_msgpack_children,
    token_ids=_native.msgpack_token_ids,
    hashes=_native.msgpack_hashes,
    hash=_msgpack_hash,
    scalar=msgspec.msgpack.Decoder(Scalar).decode,
    key_lists=msgspec.msgpack.Decoder(list[list[Any] | None] | None).decode,
)
JSON = Notation(
    name="JSON",
    null=b"null",
    children=_json_children,
    token_ids=_native.json_token_ids,
    hashes=_native.json_hashes,
    hash=_json_hash,
    scalar=msgspec.json.Decoder(Scalar).decode,
    key_lists=msgspec.json.Decoder(list[list[Any] | None] | None).decode,
)


def cut_json(arrays: Sequence[bytes]) -> Notation:
    """JSON whose arrays of numbers `_native.json_cut` has taken out already: their numbers stand for them."""
    return Notation(
        name=JSON.name,
        null=JSON.null,
        children=JSON.children,
        token_ids=lambda raw: _taken(arrays, raw, JSON.token_ids),
        hashes=lambda raw: _taken(arrays, raw, JSON.hashes),
        hash=JSON.hash,
        scalar=JSON.scalar,
        key_lists=JSON.key_lists,
    )


def _taken(arrays: Sequence[bytes], raw: Raw, parse: Callable[[Raw], bytes]) -> bytes:
    text = bytes(raw)
    # The cutter leaves nothing but null in the place of an array, and the parser says what is wrong with it.
    return arrays[int(text)] if text.isdigit() else parse(raw)
