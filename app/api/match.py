"""Who holds the longest leading part of a prompt?"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from app.api import bodies, problems
from app.api.document import described
from app.api.prompts import ARRAYS, HASHES_ALONE, make_query, read_query
from app.api.wiring import Wiring, wiring_of
from app.errors import IndexerError, InvalidInput
from app.schemas.fields import PODS_ASKED_MAX
from app.schemas.match import (
    BatchRequest,
    BatchResponse,
    MatchRequest,
    MatchResponse,
    OctetsFields,
    TextFields,
)
from app.service import MatchQuery, MatchResult, MatchRow
from app.service.hints import Hint

router = APIRouter(prefix="/v1", tags=["match"])


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
        query = await _fields_query(wiring, bodies.cut_fields(body, notation), notation)
    return bodies.answer(request, _answer(wiring, query))


@router.post("/match/batch", **described(BatchResponse, body=BatchRequest))
async def match_batch(request: Request) -> Response:
    """Several match queries at once, answered in order; one that is refused has a problem in its place."""
    wiring = wiring_of(request)
    notation = bodies.content_type(request, bodies.JSON, bodies.MSGPACK)
    bodies.refuse_query(request)
    body = await bodies.read_body(request, wiring.settings.body_bytes_max)
    fields = bodies.cut_fields(body, notation)
    for name in fields:
        if name != "queries":
            raise InvalidInput(f"{name} is not known here", field=name)
    queries_max = wiring.settings.queries_max
    queries = bodies.raw_list(fields, notation, "queries", count_max=queries_max, bound="queries_max")
    told_in = bodies.answer_notation(request)
    results = []
    for raw in queries:
        # Encoded one by one: the rows of all as objects are many times their text.
        results.append(await _batch_row(wiring, raw, notation, told_in))
        await asyncio.sleep(0)  # between two queries others have their turn
    return bodies.answer(request, {"results": results})


async def _batch_row(wiring: Wiring, raw: msgspec.Raw, notation: str, told_in: str) -> msgspec.Raw:
    try:
        query = await _fields_query(wiring, bodies.cut_fields(raw, notation), notation)
        if told_in == bodies.JSON and not (query.include_hashes or query.min_blocks or query.top_k):
            told = wiring.service.match_json(query)
            if told is not None:
                wiring.metrics.observe_match(told.deepest_blocks)
                return msgspec.Raw(told.body)
        return bodies.part(_answer(wiring, query), told_in)
    except IndexerError as error:
        return bodies.part(problems.content_of(error), told_in)


def _answer(wiring: Wiring, query: MatchQuery) -> dict[str, Any]:
    result = wiring.service.match(query)
    wiring.metrics.observe_match(result.matches[0].matched_blocks if result.matches else 0)
    return shown(result)


def _octets_query(request: Request, wiring: Wiring, body: bytes) -> MatchQuery:
    fields = bodies.validate_query(OctetsFields, request, lists=("pods",))
    if not fields.hashes:
        return make_query(fields, token_ids=bodies.octet_token_ids(body, wiring.settings.tokens_max))
    if fields.cache_salt:
        raise InvalidInput(HASHES_ALONE, field="cache_salt")
    return make_query(fields, prefix_hashes=bodies.octet_hashes(body, wiring.settings.tokens_max))


async def _fields_query(wiring: Wiring, raw: bodies.Fields, notation: str) -> MatchQuery:
    fields = bodies.validate(TextFields, raw, notation, beside=ARRAYS, lists={"pods": PODS_ASKED_MAX})
    return await read_query(wiring, fields, raw, notation)


def shown(result: MatchResult) -> dict[str, Any]:
    return {
        "model": result.model,
        "lora": result.lora,
        "block_size": result.block_size,
        "tokens": result.tokens,
        "blocks": result.blocks,
        "matches": [_shown_row(row) for row in result.matches],
        "prefix_hashes": None if result.prefix_hashes is None else bodies.numbers_of(result.prefix_hashes),
    }


def shown_hints(hints: tuple[Hint, ...]) -> list[dict[str, Any]] | None:
    shown = [
        {
            "block": hint.block,
            "tier": hint.tier.label,
            "tokens": hint.tokens,
            "metadata": msgspec.json.decode(hint.metadata),
        }
        for hint in hints
    ]
    return shown or None


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
        "hints": shown_hints(row.hints),
    }
