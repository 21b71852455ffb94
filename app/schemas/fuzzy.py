"""What of a prompt is held anywhere, exactly or nearly?"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from app.schemas.bounds import FUZZY_DISTANCE_MAX, FUZZY_MATCHES_MAX
from app.schemas.fields import Adapter, BlockSize, Body, Name, PrefixHash
from app.schemas.prompts import TokenIds

EXCLUDED_MAX = 1_024


class FuzzyFields(Body):
    """A fuzzy match, without its prompt."""

    model: Name
    lora: Adapter | None = None
    block_size: BlockSize | None = Field(
        None, description="Only blocks of this size; the smallest known of the model when absent."
    )
    add_special_tokens: bool | None = Field(
        None, description="With `text`: add what the tokenizer puts around it; yes when absent, as vLLM does."
    )
    max_distance: int = Field(
        FUZZY_DISTANCE_MAX,
        ge=0,
        le=FUZZY_DISTANCE_MAX,
        description="Bits of 64 in which the SimHashes of near blocks may differ.",
    )
    mode: Literal["grid", "sliding"] = Field(
        "grid", description="`grid`: the prompt's blocks. `sliding`: every token offset."
    )
    exclude: Annotated[list[Name], Field(max_length=EXCLUDED_MAX)] | None = Field(
        None,
        description="Pods and owners that do not count; `agent1` stands for `agent1:role` too. What a pod holds for "
        "several owners counts for the others.",
        examples=[["pod-b"]],
    )
    limit_per_block: int = Field(
        4, ge=1, le=FUZZY_MATCHES_MAX, description="Matches that are shown of a block, the best ones."
    )


class FuzzyRequest(FuzzyFields):
    """What of this prompt can be reused? Its tokens, or its text."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "m", "token_ids": [91, 11, 12, 13, 14], "mode": "sliding", "exclude": ["pod-b"]}
            ]
        }
    )

    token_ids: TokenIds = None
    text: str | None = Field(
        None, description="Instead of token ids: the prompt as text.", examples=["Once upon a time"]
    )


class FuzzyMatchRow(Body):
    """A stored block, and a rank that holds it."""

    pod: str
    dp_rank: int
    owners: list[str] = Field(description="Whom the rank holds it for; empty when its events named nobody.")
    cached_block_hash: PrefixHash = Field(description="Prefix hash of the stored block.")
    hamming_distance: int
    confidence: float = Field(description="1 - hamming_distance / 64")
    kind: Literal["exact", "near"] = Field(description="Exact: the same tokens, not only the same SimHash.")


class FuzzyBlockRow(Body):
    """A place of the prompt, `block_size` tokens long, that is held somewhere."""

    block_index: int | None = Field(description="Null off the block grid.")
    token_offset: int
    kind: Literal["exact", "near"]
    matches: list[FuzzyMatchRow] = Field(description="Best first.")


class FuzzyRunRow(Body):
    """Neighbouring places of one kind."""

    token_offset: int
    tokens: int
    kind: Literal["exact", "near"]


class FuzzyPodRow(Body):
    """What of the prompt one pod has, any of its ranks."""

    pod: str
    reusable_blocks: int
    reusable_tokens: int
    coverage: float = Field(description="Reusable share of the prompt's tokens.")
    mean_confidence: float


class FuzzyOwnerRow(Body):
    """What of the prompt pods hold for one owner."""

    owner: str
    reusable_blocks: int
    reusable_tokens: int
    coverage: float = Field(description="Reusable share of the prompt's tokens.")
    mean_confidence: float


class FuzzyResponse(Body):
    """What can be reused, by place, by pod and by owner."""

    model: str
    lora: str | None
    block_size: int
    tokens: int
    blocks: list[FuzzyBlockRow] = Field(description="By offset; they do not overlap.")
    runs: list[FuzzyRunRow]
    pods: list[FuzzyPodRow] = Field(description="Most reusable tokens first.")
    owners: list[FuzzyOwnerRow] = Field(description="Most reusable tokens first.")
    shared_prefix_hash: str | None = Field(
        description="The prompt's first prefix hash as 16 hex digits, a hint for routers; null when it fills no block."
    )
