"""Prefix hashes of a prompt, and what routers announce with them."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from app.schemas.fields import Body, DpRank, Name, PrefixHash, TokenId
from app.schemas.prompts import ExtraKeys, PrefixHashes, PromptFields, TokenIds


class HashesRequest(PromptFields):
    """The prompt whose prefix hashes are asked for."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "m", "token_ids": [11, 12, 13, 14]}]})

    token_ids: list[TokenId]
    extra_keys: ExtraKeys = None


class HashesResponse(Body):
    """One prefix hash a full block."""

    prefix_hashes: list[PrefixHash]


class PrefixesFields(PromptFields):
    """Where a request was sent, without its arrays."""

    pod: Name
    dp_rank: DpRank = 0
    ttl_s: float = Field(2.0, gt=0, description="Seconds after which the announcement expires on its own.")


class PrefixesRequest(PrefixesFields):
    """The router says where it sent a request: entries are speculative until the engine confirms them."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "m", "pod": "pod-a", "token_ids": [11, 12, 13, 14], "ttl_s": 2.0}]
        }
    )

    token_ids: TokenIds = None
    prefix_hashes: PrefixHashes = None
    extra_keys: ExtraKeys = None


class PrefixesResponse(Body):
    """How many blocks are announced now: not those that the rank holds or that found no room."""

    added: int
