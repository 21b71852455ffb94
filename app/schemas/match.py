"""Which pods hold the longest leading part of a prompt?"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from app.schemas.bounds import TOKEN_ID_MAX
from app.schemas.fields import PODS_ASKED_MAX, Body, Name, PrefixHash, StateLabel
from app.schemas.problems import Problem
from app.schemas.prompts import PromptFields, PromptParts


class MatchFields(PromptFields):
    """A match query without its arrays."""

    pods: Annotated[list[Name], Field(max_length=PODS_ASKED_MAX)] | None = Field(
        None, description="Only these pods (those that are ready to serve)."
    )
    include_hashes: bool = Field(False, description="Answer the prompt's prefix hashes too.")
    min_blocks: int = Field(
        0, ge=0, le=TOKEN_ID_MAX, description="Leave out ranks with fewer confirmed blocks.", examples=[4]
    )
    top_k: int | None = Field(
        None, ge=1, le=PODS_ASKED_MAX, description="At most so many ranks, the best ones.", examples=[3]
    )


class OctetsFields(MatchFields):
    """The query parameters of a raw body."""

    hashes: bool = Field(
        False, description="The raw body is prefix hashes, as little-endian uint64, and not token ids."
    )


class TextFields(MatchFields):
    """A match query that may be text or chat, without what is text or array."""

    add_generation_prompt: bool = Field(
        True, description="With `messages`: the chat template opens the answer, as an engine's does."
    )
    continue_final_message: bool = Field(
        False, description="With `messages`: the last of them is to be continued, not answered."
    )
    add_special_tokens: bool | None = Field(
        None,
        description="Add what the tokenizer puts around a text; as vLLM when absent: yes for `text`, no for `messages`.",
    )


class MatchRequest(PromptParts, TextFields):
    """Which pods hold the longest leading part of this prompt?"""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "m", "token_ids": [11, 12, 13, 14, 15], "pods": ["pod-a"]}]}
    )


class HintResponse(Body):
    """`metadata` of an event, brought back."""

    block: int = Field(description="The engine's own name for the block.")
    tier: str
    tokens: int = Field(description="Where the block ends in the prompt.")
    metadata: dict[str, Any] = Field(description="As the event said it.")


class MatchRowResponse(Body):
    """How much of the prompt one rank of one pod holds, and how far that can be trusted."""

    pod: str
    dp_rank: int
    matched_blocks: int
    matched_tokens: int
    reusable_tokens: int = Field(
        description="What an engine reuses: block_size * min(matched_blocks, (tokens - 1) // block_size)."
    )
    percent: float = Field(description="Matched share of the prompt's full blocks.")
    tiers: dict[str, int] = Field(description="Depth in blocks by tier, cumulative from fast to slow.")
    speculative_blocks: int = Field(description="Depth when blocks announced by `/v1/prefixes` count too.")
    state: StateLabel
    last_event_age_s: float | None
    hints: list[HintResponse] | None = Field(
        None,
        description="What the engine said of blocks of this prompt that it holds; longest prefixes first.",
    )


class MatchResponse(Body):
    """Best first; ranks without a match are left out."""

    model: str
    lora: str | None
    block_size: int
    tokens: int
    blocks: int
    matches: list[MatchRowResponse]
    prefix_hashes: list[PrefixHash] | None


class BatchRequest(Body):
    """Several match queries."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "queries": [
                        {"model": "m", "token_ids": [11, 12, 13, 14, 15]},
                        {"model": "m", "token_ids": [11, 12, 13, 14], "top_k": 1},
                    ]
                }
            ]
        }
    )

    queries: list[MatchRequest]


class BatchResponse(Body):
    """The answers in the order of the queries; a problem where a query was refused."""

    results: list[MatchResponse | Problem]
