"""Events as an engine publishes them, in the shape of each group of releases: for simulated pods and tests.

A form is a table of field names, in wire order, and of those that have no default. The engines' encoders are
msgspec structs, and so are these: arrays carry every field of their release, maps leave out optional fields
that are null. What an event sets beyond its form is not published, as the old engine would not.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Any

import msgspec

EngineHash = int | bytes


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """BlockStored with the fields of every release and engine."""

    block_hashes: Sequence[EngineHash]
    token_ids: Sequence[int | Sequence[int]]  # pairs where SGLang runs EAGLE
    block_size: int
    parent_block_hash: EngineHash | None = None
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: Sequence[Sequence[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: Sequence[int] | None = None
    cache_salt: str | None = None


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """BlockRemoved with the fields of every release and engine."""

    block_hashes: Sequence[EngineHash]
    medium: str | None = "GPU"
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class Cleared(msgspec.Struct, frozen=True, kw_only=True):
    """AllBlocksCleared."""


WireEvent = Stored | Removed | Cleared


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The names in `required` have no default; with `is_batch_map` the batch is a map too."""

    stored: tuple[str, ...]
    removed: tuple[str, ...]
    required: frozenset[str]
    is_map: bool
    is_batch_map: bool = False


_BASE = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")
_KINDS = ("kv_cache_spec_kind", "kv_cache_spec_sliding_window")
_REQUIRED = frozenset({*_BASE, "medium", "lora_name"})
_STORED_0_14 = (*_BASE, "medium", "lora_name")
_STORED_0_17 = (*_STORED_0_14, "extra_keys")
_STORED_0_20 = (*_STORED_0_17, "group_idx")
_STORED_0_22 = (*_STORED_0_20, *_KINDS)
_STORED_0_26 = (*_STORED_0_22, "locality")
_STORED_0_29 = (*_STORED_0_26, "ownership")
_STORED_0_30 = (*_STORED_0_29, "session_id")
_STORED_0_33 = (*_STORED_0_30, "lookahead_token_ids")
_STORED_SGLANG = (*_BASE, "medium", "cache_salt", "session_id", "lora_name")
_REMOVED_0_10 = ("block_hashes", "medium")
_REMOVED_0_20 = (*_REMOVED_0_10, "group_idx")
_REMOVED_0_26 = (*_REMOVED_0_20, "locality")
_REMOVED_0_29 = (*_REMOVED_0_26, "ownership")
_REQUIRED_SGLANG = frozenset(_BASE)


class WireForm(enum.Enum):
    """Named after the first vLLM release that has it. LMCache publishes in the form of the vLLM around it."""

    ARRAYS_0_9 = Shape(_BASE, ("block_hashes",), _REQUIRED, is_map=False)
    ARRAYS_0_10 = Shape((*_BASE, "medium"), _REMOVED_0_10, _REQUIRED, is_map=False)
    ARRAYS_0_14 = Shape(_STORED_0_14, _REMOVED_0_10, _REQUIRED, is_map=False)
    ARRAYS_0_17 = Shape(_STORED_0_17, _REMOVED_0_10, _REQUIRED, is_map=False)
    ARRAYS_0_20 = Shape(_STORED_0_20, _REMOVED_0_20, _REQUIRED, is_map=False)
    ARRAYS_0_22 = Shape(_STORED_0_22, _REMOVED_0_20, _REQUIRED, is_map=False)
    MAPS_0_24 = Shape(_STORED_0_22, _REMOVED_0_20, _REQUIRED, is_map=True)
    MAPS_0_26 = Shape(_STORED_0_26, _REMOVED_0_26, _REQUIRED, is_map=True)
    MAPS_0_29 = Shape(_STORED_0_29, _REMOVED_0_29, _REQUIRED, is_map=True)
    MAPS_0_30 = Shape(_STORED_0_30, _REMOVED_0_29, _REQUIRED, is_map=True)
    MAPS_0_33 = Shape(_STORED_0_33, _REMOVED_0_29, _REQUIRED, is_map=True)
    BATCH_MAP = Shape(_STORED_0_22, _REMOVED_0_20, _REQUIRED, is_map=True, is_batch_map=True)
    SGLANG_ARRAYS = Shape((*_BASE, "medium"), _REMOVED_0_10, _REQUIRED_SGLANG, is_map=False)
    SGLANG_MAPS = Shape(_STORED_SGLANG, _REMOVED_0_10, _REQUIRED_SGLANG, is_map=True)


_encoder = msgspec.msgpack.Encoder()


def encode_batch(
    form: WireForm, *, ts: float, events: Sequence[WireEvent | msgspec.Raw], dp_rank: int | None = 0
) -> bytes:
    """The payload frame. A `msgspec.Raw` among the events is put in as it is."""
    encoded = [event if isinstance(event, msgspec.Raw) else _wire_struct(form, event) for event in events]
    if form.value.is_batch_map:
        rank = {} if dp_rank is None else {"data_parallel_rank": dp_rank}
        return _encoder.encode({"type": "KVEventBatch", "ts": ts, "events": encoded, **rank})
    return _encoder.encode([ts, encoded, dp_rank])


def _wire_struct(form: WireForm, event: WireEvent) -> msgspec.Struct:
    match event:
        case Stored():
            tag, names = "BlockStored", form.value.stored
        case Removed():
            tag, names = "BlockRemoved", form.value.removed
        case Cleared():
            tag, names = "AllBlocksCleared", ()
    return _struct_type(form, tag, names)(*(getattr(event, name) for name in names))


@functools.cache
def _struct_type(form: WireForm, tag: str, names: tuple[str, ...]) -> type[msgspec.Struct]:
    shape = form.value
    fields = [(name, Any) if name in shape.required else (name, Any, None) for name in names]
    return msgspec.defstruct(tag, fields, tag=True, omit_defaults=True, array_like=not shape.is_map)
