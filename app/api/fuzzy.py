"""What of a prompt can be reused where its prefix differs?"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from app.api import bodies
from app.api.document import described
from app.api.wiring import Wiring, wiring_of
from app.errors import InvalidInput
from app.schemas.fuzzy import EXCLUDED_MAX, FuzzyFields, FuzzyRequest, FuzzyResponse
from app.service import FuzzyQuery, FuzzyResult
from app.tokenizer.prompts import Prompt

router = APIRouter(prefix="/v1", tags=["match"])


@router.post("/fuzzy-match", **described(FuzzyResponse, body=FuzzyRequest))
async def fuzzy_match(request: Request) -> Response:
    """Blocks of a prompt that are held anywhere, exactly or nearly, whatever stands before them.

    With `exclude` an agent asks for what pods hold for others: its own name leaves out what they hold for it alone.

    `grid` compares the prompt's blocks with stored ones, `sliding` looks at every token offset. 501 where the
    setting `fuzzy` is off.
    """
    wiring = wiring_of(request)
    wiring.service.fuzzy.check()
    notation = bodies.content_type(request, bodies.JSON, bodies.MSGPACK)
    bodies.refuse_query(request)
    body = await bodies.read_body(request, wiring.settings.body_bytes_max)
    raw = bodies.cut_fields(body, notation)
    fields = bodies.validate(
        FuzzyFields, raw, notation, beside=("token_ids", "text"), lists={"exclude": EXCLUDED_MAX}
    )
    query = FuzzyQuery(
        model=fields.model,
        token_ids=await _token_ids(wiring, fields, raw, notation),
        lora=fields.lora or None,
        block_size=fields.block_size,
        max_distance=fields.max_distance,
        mode=fields.mode,
        exclude=tuple(fields.exclude or ()),
        limit_per_block=fields.limit_per_block,
    )
    return bodies.answer(request, _shown(fields, await wiring.service.fuzzy.ask(query)))


async def _token_ids(wiring: Wiring, fields: FuzzyFields, raw: bodies.Fields, notation: str) -> bytes:
    text = bodies.raw_value(raw, notation, "text")
    token_ids = bodies.token_ids(raw, notation, wiring.settings.tokens_max)
    if (text is None) == (token_ids is None):
        raise InvalidInput("exactly one of token_ids and text is needed", field="token_ids")
    if token_ids is not None:
        return token_ids
    prompt = Prompt(
        "json" if notation == bodies.JSON else "msgpack",
        text=text,
        add_special_tokens=fields.add_special_tokens,
    )
    return await wiring.tokenizer.token_ids(fields.model, prompt)


def _shown(fields: FuzzyFields, result: FuzzyResult) -> dict[str, Any]:
    first = result.shared_prefix_hash
    return {
        "model": fields.model,
        "lora": fields.lora or None,
        "block_size": result.block_size,
        "tokens": result.tokens,
        **msgspec.structs.asdict(result.answer),
        "shared_prefix_hash": None if first is None else f"{first:016x}",
    }
