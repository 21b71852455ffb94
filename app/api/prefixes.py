"""Prefix hashes of a prompt, and what routers announce with them."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from app.api import bodies
from app.api.document import described
from app.api.prompts import HASHES_ALONE
from app.api.wiring import Wiring, wiring_of
from app.errors import InvalidInput
from app.extra_keys import query_extra_keys
from app.schemas.prefixes import (
    HashesRequest,
    HashesResponse,
    PrefixesFields,
    PrefixesRequest,
    PrefixesResponse,
)
from app.schemas.prompts import PromptFields

router = APIRouter(prefix="/v1", tags=["match"])


@router.post("/hashes", **described(HashesResponse, body=HashesRequest))
async def hashes(request: Request) -> Response:
    """The prefix hashes of a prompt, one a full block: what `/v1/match` takes instead of token ids."""
    wiring, notation, raw = await _read(request)
    fields = bodies.validate(PromptFields, raw, notation, beside=("token_ids", "extra_keys"))
    made = _hash(wiring, fields, raw, notation)
    if made is None:
        raise InvalidInput("token_ids is needed", field="token_ids")
    return bodies.answer(request, {"prefix_hashes": bodies.numbers_of(made)})


@router.post("/prefixes", **described(PrefixesResponse, body=PrefixesRequest))
async def prefixes(request: Request) -> Response:
    """A router says where it sent a request: the blocks are speculative until the engine confirms them.

    They expire on their own and never outlive or remove confirmed ones.
    """
    wiring, notation, raw = await _read(request)
    fields = bodies.validate(
        PrefixesFields, raw, notation, beside=("token_ids", "prefix_hashes", "extra_keys")
    )
    given = bodies.prefix_hashes(raw, notation, wiring.settings.tokens_max)
    made = _hash(wiring, fields, raw, notation)
    announced = made if given is None else given
    if announced is None or (given is not None and made is not None):
        raise InvalidInput("exactly one of token_ids and prefix_hashes is needed", field="token_ids")
    if made is None and ("extra_keys" in raw or fields.cache_salt):
        raise InvalidInput(HASHES_ALONE, field="prefix_hashes")
    added = wiring.service.add_speculative(
        fields.pod,
        fields.dp_rank,
        fields.model,
        fields.lora or None,
        announced,
        fields.ttl_s,
        fields.block_size,
    )
    return bodies.answer(request, {"added": added})


async def _read(request: Request) -> tuple[Wiring, str, bodies.Fields]:
    wiring = wiring_of(request)
    notation = bodies.content_type(request, bodies.JSON, bodies.MSGPACK)
    bodies.refuse_query(request)
    body = await bodies.read_body(request, wiring.settings.body_bytes_max)
    return wiring, notation, bodies.cut_fields(body, notation)


def _hash(wiring: Wiring, fields: PromptFields, raw: bodies.Fields, notation: str) -> bytes | None:
    token_ids = bodies.token_ids(raw, notation, wiring.settings.tokens_max)
    if token_ids is None:
        return None
    lora = fields.lora or None
    extra_keys = query_extra_keys(bodies.extra_keys(raw, notation), lora=lora, cache_salt=fields.cache_salt)
    return wiring.service.prefix_hashes(fields.model, lora, token_ids, extra_keys, fields.block_size)
