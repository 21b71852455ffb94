"""Which prompt? What questions about one have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from app.schemas.fields import NAME_CHARS_MAX, Adapter, BlockSize, Body, Name, PrefixHash, TokenId

TokenIds = Annotated[list[TokenId] | None, Field(description="The prompt's token ids.")]
PrefixHashes = Annotated[
    list[PrefixHash] | None,
    Field(description="Instead of token ids: prefix hashes, as `/v1/hashes` gives them."),
]
ExtraKeys = Annotated[
    list[list[Any] | None] | None,
    Field(
        description="A list a block of what else makes it differ (image hashes ...); fewer than blocks will do."
    ),
]


class PromptFields(Body):
    """Which prompt, without its arrays."""

    model: Name
    lora: Adapter | None = None
    cache_salt: Annotated[str, Field(max_length=NAME_CHARS_MAX)] | None = Field(
        None, description="The request's cache salt: its blocks are shared with no other salt."
    )
    block_size: BlockSize | None = Field(
        None, description="Only prefixes of this block size; needed only where pods of a model differ."
    )


class PromptParts(BaseModel):
    """A prompt: exactly one of `token_ids`, `prefix_hashes`, `text` and `messages`, and what belongs to it."""

    token_ids: TokenIds = None
    prefix_hashes: PrefixHashes = None
    text: str | None = Field(
        None,
        description="Instead of token ids: the prompt, tokenised as the engine does it for completions.",
        examples=["Once upon a time"],
    )
    messages: list[dict[str, Any]] | None = Field(
        None,
        description="Instead of token ids: chat messages, as in the OpenAI API; text only.",
        examples=[[{"role": "user", "content": "Hello"}]],
    )
    tools: list[dict[str, Any]] | None = Field(
        None,
        description="With `messages`: the tools that the chat template writes down.",
        examples=[[{"type": "function", "function": {"name": "now"}}]],
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None,
        description="With `messages`: other variables of the chat template.",
        examples=[{"enable_thinking": False}],
    )
    extra_keys: ExtraKeys = None
