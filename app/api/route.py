"""Where should a prompt go?"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from app.api import bodies
from app.api.access import may_write
from app.api.document import described
from app.api.match import shown_hints
from app.api.prompts import ARRAYS, read_query
from app.api.wiring import wiring_of
from app.routing.router import RouteResult
from app.routing.routing import Load, Policy, Ranked, reason
from app.schemas.fields import PODS_ASKED_MAX
from app.schemas.route import RouteFields, RouteRequest, RouteResponse

router = APIRouter(prefix="/v1", tags=["match"])

CANDIDATES_SHOWN = 64  # without `top_k`

_Requests = Annotated[float, Meta(ge=0, le=1e9)]


class _Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What LoadFields says, decoded without an object more than it needs."""

    running: _Requests = 0.0
    waiting: _Requests = 0.0
    kv_usage: Annotated[float, Meta(ge=0, le=1)] = 0.0


@router.post("/route", **described(RouteResponse, body=RouteRequest))
async def route(request: Request) -> Response:
    """Chooses a pod for a prompt by what each holds of it and how busy it is.

    With a key of scope `read` nothing is reserved, whatever `reserve` says: announcing is writing, as `/v1/prefixes` is.
    """
    wiring = wiring_of(request)
    notation = bodies.content_type(request, bodies.JSON, bodies.MSGPACK)
    bodies.refuse_query(request)
    body = await bodies.read_body(request, wiring.settings.body_bytes_max)
    raw = bodies.cut_fields(body, notation)
    beside = (*ARRAYS, "loads")
    fields = bodies.validate(RouteFields, raw, notation, beside=beside, lists={"pods": PODS_ASKED_MAX})
    loads = bodies.objects(raw, notation, "loads", _Load, PODS_ASKED_MAX)
    query = await read_query(wiring, fields, raw, notation)
    result = wiring.router.route(
        query,
        policy=Policy(fields.policy),
        loads={pod: Load(said.running, said.waiting, said.kv_usage) for pod, said in loads.items()},
        reserve=fields.reserve and may_write(request),
        ttl_s=fields.ttl_s,
        dry_run=fields.dry_run,
    )
    held = result.match.matches
    wiring.metrics.observe_match(held[0].matched_blocks if held else 0)
    return bodies.answer(request, _shown(result, fields))


def _shown(result: RouteResult, fields: RouteFields) -> dict[str, Any]:
    match, best = result.match, result.ranked[0]
    # `min_blocks` leaves out rows, never the choice itself.
    rows = [row for row in result.ranked if row is best or _matched(row) >= fields.min_blocks]
    hashes = match.prefix_hashes if fields.include_hashes else None
    return {
        "pod": best.candidate.pod,
        "dp_rank": best.candidate.dp_rank,
        "score": best.score,
        "policy": fields.policy,
        "model": match.model,
        "lora": match.lora,
        "block_size": match.block_size,
        "tokens": match.tokens,
        "blocks": match.blocks,
        "reserved_blocks": result.reserved_blocks,
        "hints": None if best.candidate.row is None else shown_hints(best.candidate.row.hints),
        "candidates": [_shown_row(row, match.tokens) for row in rows[: fields.top_k or CANDIDATES_SHOWN]],
        "prefix_hashes": None if hashes is None else bodies.numbers_of(hashes),
    }


def _matched(ranked: Ranked) -> int:
    row = ranked.candidate.row
    return 0 if row is None else row.matched_blocks


def _shown_row(ranked: Ranked, tokens: int) -> dict[str, Any]:
    candidate = ranked.candidate
    load = candidate.load
    return {
        "pod": candidate.pod,
        "dp_rank": candidate.dp_rank,
        "score": ranked.score,
        "matched_blocks": _matched(ranked),
        "speculative_blocks": 0 if candidate.row is None else candidate.row.speculative_blocks,
        "load": None
        if load is None
        else {"running": load.running, "waiting": load.waiting, "kv_usage": load.kv_usage},
        "own_requests": candidate.own,
        "state": candidate.state,
        "reason": reason(ranked, tokens=tokens),
    }
