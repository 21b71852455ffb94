"""`POST /v1/match` on the short way: tokens and hashes go from the body to the index as buffers.

Reads JSON without `extra_keys` and `include_hashes`, and raw bodies with any query; answers that have hints go the
long way. See app/api/short_way.py.
"""

from __future__ import annotations

import functools
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.datastructures import QueryParams

from app import _native
from app.api import bodies
from app.api.wiring import Wiring
from app.errors import InvalidInput
from app.extra_keys import query_extra_keys
from app.schemas.bounds import BLOCK_SIZE_MAX
from app.schemas.fields import NAME_CHARS_MAX, PODS_ASKED_MAX
from app.schemas.match import OctetsFields
from app.service import MatchQuery

QUERY_BYTES_MAX = 2_048  # of a query string that is worth remembering

# Of a body without its arrays that is worth remembering.
REST_BYTES_MAX = 1_024

# Model, adapter, extra keys, block size, pods.
_Fields = tuple[str, str | None, tuple[bytes, ...] | None, int | None, frozenset[str] | None]

_Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
_Text = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]


class _Match(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is left of a JSON query: the arrays are numbers now. Nothing here that MatchFields would refuse."""

    model: _Name
    token_ids: int | None = None
    prefix_hashes: int | None = None
    lora: _Text | None = None
    cache_salt: _Text | None = None
    block_size: Annotated[int, Meta(ge=1, le=BLOCK_SIZE_MAX)] | None = None
    pods: Annotated[list[_Name], Meta(max_length=PODS_ASKED_MAX)] | None = None
    include_hashes: bool = False


_decoder = msgspec.json.Decoder(_Match)
# A parameter that is not here is for the long way, also one that a later release adds to the model.
_QUERY_KNOWN = {"model", "lora", "cache_salt", "block_size", "pods", "hashes", "include_hashes"}


def answer(wiring: Wiring, notation: str, query_string: bytes, body: bytes | memoryview) -> bytes | None:
    """None: for the long way."""
    tokens_max = wiring.settings.tokens_max
    if notation == bodies.JSON and not query_string:
        query = _json_query(body, tokens_max)
    elif notation == bodies.OCTETS:
        query = _octets_query(query_string, body, tokens_max)
    else:
        return None
    if query is None:
        return None
    result = wiring.service.match_json(query)
    if result is None:
        return None
    wiring.metrics.observe_match(result.deepest_blocks)
    return result.body


def _json_query(body: bytes | memoryview, tokens_max: int) -> MatchQuery | None:
    cut = _native.json_cut(body, tokens_max, 2)
    if cut is None:
        return None
    rest, arrays = cut
    read = _read_rest if len(rest) <= REST_BYTES_MAX else _read_rest.__wrapped__
    asked = read(rest)
    if asked is None:
        return None
    fields, token_array, hash_array = asked
    model, lora, extra_keys, block_size, pods = fields
    return MatchQuery(
        model,
        lora,
        None if token_array is None else arrays[token_array],
        None if hash_array is None else arrays[hash_array],
        extra_keys,
        block_size,
        pods,
    )


@functools.lru_cache(maxsize=1_024)
def _read_rest(rest: bytes) -> tuple[_Fields, int | None, int | None] | None:
    """What a body says beside its arrays, and which of them are its tokens and its hashes; None: for the long way.

    A router says the same with every query, so it is read once.
    """
    asked = bodies.decode_rest(_decoder, rest, PODS_ASKED_MAX)
    if asked is None or asked.include_hashes or (asked.token_ids is None) == (asked.prefix_hashes is None):
        return None
    if asked.prefix_hashes is not None and asked.cache_salt:
        return None
    if not _plain(asked.model) or not _plain(asked.lora) or not all(map(_plain, asked.pods or ())):
        return None
    lora = asked.lora or None
    keys = query_extra_keys(None, lora=lora, cache_salt=asked.cache_salt) if asked.cache_salt else None
    pods = None if asked.pods is None else frozenset(asked.pods)
    return (asked.model, lora, keys, asked.block_size, pods), asked.token_ids, asked.prefix_hashes


def _plain(name: str | None) -> bool:
    """Surely without control characters; the long way knows better about the rest."""
    return name is None or name.isprintable()


def _octets_query(query_string: bytes, body: bytes | memoryview, tokens_max: int) -> MatchQuery | None:
    if len(query_string) > QUERY_BYTES_MAX:
        return None
    known = _query_fields(query_string)
    if known is None:
        return None
    fields, extra_keys, pods = known
    width = 8 if fields.hashes else 4
    if len(body) % width or len(body) > width * tokens_max:
        return None
    return MatchQuery(
        model=fields.model,
        lora=fields.lora or None,
        token_ids=None if fields.hashes else bytes(body),
        prefix_hashes=bytes(body) if fields.hashes else None,
        extra_keys=extra_keys,
        block_size=fields.block_size,
        pods=pods,
    )


@functools.lru_cache(maxsize=1_024)
def _query_fields(
    query_string: bytes,
) -> tuple[OctetsFields, tuple[bytes, ...] | None, frozenset[str] | None] | None:
    """A query string, read as the long way reads it; routers send few different ones."""
    try:
        fields = bodies.validate_params(OctetsFields, QueryParams(query_string), lists=("pods",))
        extra_keys = query_extra_keys(None, lora=fields.lora or None, cache_salt=fields.cache_salt)
    except InvalidInput:
        return None
    if (
        fields.include_hashes
        or fields.model_fields_set - _QUERY_KNOWN
        or (fields.hashes and fields.cache_salt)
    ):
        return None
    return fields, extra_keys, None if fields.pods is None else frozenset(fields.pods)
