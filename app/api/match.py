"""Who holds the longest leading part of a prompt?"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from app.api import bodies
from app.api.document import described
from app.api.wiring import Wiring, wiring_of
from app.errors import InvalidInput
from app.extra_keys import query_extra_keys
from app.schemas import PODS_ASKED_MAX, MatchFields, MatchRequest, MatchResponse, OctetsFields
from app.service import MatchQuery, MatchResult, MatchRow

router = APIRouter(prefix="/v1", tags=["match"])

HASHES_ALONE = "prefix_hashes have salts and extra keys in them already: send none beside them"

_ARRAYS = ("token_ids", "prefix_hashes", "extra_keys")


@router.post("/match", **described(MatchResponse, body=MatchRequest, query=OctetsFields, octets=True))
async def match(request: Request) -> Response:
    """How much of a prompt each pod holds, best first.

    As `application/octet-stream` the body is the token ids alone, as little-endian uint32, and the other
    fields are query parameters; with `hashes=true` it is the prefix hashes, as little-endian uint64.
    """
    wiring = wiring_of(request)
    notation = bodies.content_type(request, bodies.JSON, bodies.MSGPACK, bodies.OCTETS)
    body = await bodies.read_body(request, wiring.settings.body_bytes_max)
    if notation == bodies.OCTETS:
        query = _octets_query(request, wiring, body)
    else:
        bodies.refuse_query(request)
        query = _fields_query(wiring, body, notation)
    result = wiring.service.match(query)
    wiring.metrics.observe_match(result.matches[0].matched_blocks if result.matches else 0)
    return bodies.answer(request, _shown(result))


def _octets_query(request: Request, wiring: Wiring, body: bytes) -> MatchQuery:
    fields = bodies.validate_query(OctetsFields, request, lists=("pods",))
    if not fields.hashes:
        return _query(fields, token_ids=bodies.octet_token_ids(body, wiring.settings.tokens_max))
    if fields.cache_salt:
        raise InvalidInput(HASHES_ALONE, field="cache_salt")
    hashes = bodies.octet_hashes(body, wiring.settings.tokens_max)
    return _query(fields, token_ids=None, prefix_hashes=hashes)


def _fields_query(wiring: Wiring, body: bytes, notation: str) -> MatchQuery:
    raw = bodies.cut_fields(body, notation)
    fields = bodies.validate(MatchFields, raw, notation, beside=_ARRAYS, lists={"pods": PODS_ASKED_MAX})
    token_ids = bodies.token_ids(raw, notation, wiring.settings.tokens_max)
    hashes = bodies.prefix_hashes(raw, notation, wiring.settings.tokens_max)
    extra_keys = bodies.extra_keys(raw, notation)
    if (token_ids is None) == (hashes is None):
        raise InvalidInput("exactly one of token_ids and prefix_hashes is needed", field="token_ids")
    if hashes is not None and (extra_keys is not None or fields.cache_salt):
        raise InvalidInput(HASHES_ALONE, field="prefix_hashes")
    return _query(fields, token_ids=token_ids, prefix_hashes=hashes, extra_keys=extra_keys)


def _query(
    fields: MatchFields,
    *,
    token_ids: bytes | None,
    prefix_hashes: bytes | None = None,
    extra_keys: list[list[Any] | None] | None = None,
) -> MatchQuery:
    lora = fields.lora or None
    return MatchQuery(
        model=fields.model,
        lora=lora,
        token_ids=token_ids,
        prefix_hashes=prefix_hashes,
        extra_keys=query_extra_keys(extra_keys, lora=lora, cache_salt=fields.cache_salt),
        block_size=fields.block_size,
        pods=None if fields.pods is None else frozenset(fields.pods),
        include_hashes=fields.include_hashes,
    )


def _shown(result: MatchResult) -> dict[str, Any]:
    return {
        "model": result.model,
        "lora": result.lora,
        "block_size": result.block_size,
        "tokens": result.tokens,
        "blocks": result.blocks,
        "matches": [_shown_row(row) for row in result.matches],
        "prefix_hashes": None if result.prefix_hashes is None else bodies.numbers_of(result.prefix_hashes),
    }


def _shown_row(row: MatchRow) -> dict[str, Any]:
    return {
        "pod": row.pod,
        "dp_rank": row.dp_rank,
        "matched_blocks": row.matched_blocks,
        "matched_tokens": row.matched_tokens,
        "reusable_tokens": row.reusable_tokens,
        "percent": row.percent,
        "tiers": row.tiers,
        "speculative_blocks": row.speculative_blocks,
        "state": row.state,
        "last_event_age_s": row.last_event_age_s,
        "hints": None,
    }
