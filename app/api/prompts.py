"""The prompt of a request, whichever way it is said: token ids, prefix hashes, text or chat messages."""

from __future__ import annotations

from typing import Any

from app.api import bodies
from app.api.wiring import Wiring
from app.errors import InvalidInput
from app.extra_keys import query_extra_keys
from app.schemas.match import MatchFields, TextFields
from app.service import MatchQuery
from app.tokenizer.prompts import Prompt

HASHES_ALONE = "prefix_hashes have salts and extra keys in them already: send none beside them"
ARRAYS = (
    "token_ids",
    "prefix_hashes",
    "extra_keys",
    "text",
    "messages",
    "tools",
    "chat_template_kwargs",
)

_WAYS = ("token_ids", "prefix_hashes", "text", "messages")
_ONE_WAY = f"exactly one of {', '.join(_WAYS[:-1])} and {_WAYS[-1]} is needed"


async def read_query(wiring: Wiring, fields: MatchFields, raw: bodies.Fields, notation: str) -> MatchQuery:
    """`fields` are what was validated of `raw`, without ARRAYS. Raises what the prompt's faults are."""
    given = [name for name in _WAYS if bodies.raw_value(raw, notation, name) is not None]
    if len(given) != 1:
        raise InvalidInput(_ONE_WAY, field=given[1] if given else "token_ids")
    (way,) = given
    for name in ("tools", "chat_template_kwargs"):
        if way != "messages" and bodies.raw_value(raw, notation, name) is not None:
            raise InvalidInput(f"{name} belongs to messages", field=name)
    extra_keys = bodies.extra_keys(raw, notation)
    hashes = bodies.prefix_hashes(raw, notation, wiring.settings.tokens_max)
    if hashes is not None:
        if extra_keys is not None or fields.cache_salt:
            raise InvalidInput(HASHES_ALONE, field="prefix_hashes")
        return make_query(fields, prefix_hashes=hashes)
    token_ids = bodies.token_ids(raw, notation, wiring.settings.tokens_max)
    if token_ids is None:
        assert isinstance(fields, TextFields), "text and messages are declared where they are taken"
        token_ids = await tokenise(wiring, fields, raw, notation)
    return make_query(fields, token_ids=token_ids, extra_keys=extra_keys)


def make_query(
    fields: MatchFields,
    *,
    token_ids: bytes | None = None,
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
        min_blocks=fields.min_blocks,
        top_k=fields.top_k,
    )


async def tokenise(wiring: Wiring, fields: TextFields, raw: bodies.Fields, notation: str) -> bytes:
    """Token ids of `text` or `messages`, one of which is there."""
    prompt = Prompt(
        "json" if notation == bodies.JSON else "msgpack",
        text=bodies.raw_value(raw, notation, "text"),
        messages=bodies.raw_value(raw, notation, "messages"),
        tools=bodies.raw_value(raw, notation, "tools"),
        template_arguments=bodies.raw_value(raw, notation, "chat_template_kwargs"),
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        add_special_tokens=fields.add_special_tokens,
    )
    return await wiring.tokenizer.token_ids(fields.model, prompt)
