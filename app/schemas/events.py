"""Batches of events as they are posted, and what came of one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.schemas.fields import (
    BLOCK_SIZE_MAX,
    HASH_MAX,
    Adapter,
    Body,
    DpRank,
    EngineHash,
    Name,
    PrefixHash,
    TokenId,
)


class StoredEvent(BaseModel):
    """Consecutive blocks that the engine now holds, the first of them a child of `parent_block_hash`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["BlockStored"]
    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None = None
    token_ids: list[TokenId] = Field(
        description="`block_size` a block; empty where the blocks were named before."
    )
    block_size: int = Field(ge=0)
    lora_id: int | None = None
    lora_name: str | None = None
    medium: str | None = Field(None, description="Where the blocks lie; GPU when absent.")
    extra_keys: list[list[Any] | None] | None = Field(
        None, description="One list a block: salts, image hashes ..."
    )
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class ClaimedBlocks(BaseModel):
    """Blocks of an event that are stored for an owner."""

    model_config = ConfigDict(extra="allow", frozen=True)

    owner: Name
    blocks: list[PrefixHash] = Field(
        description="Of `block_hashes`, as numbers without a sign; others count for nothing."
    )


class PrefixesEvent(BaseModel):
    """Blocks whose prefix hashes are known: what a dump says, and no engine. The same again changes nothing."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["PrefixesStored"]
    block_hashes: list[EngineHash]
    prefix_hashes: list[PrefixHash] = Field(description="One a block, in any order of blocks.")
    block_size: int = Field(ge=1, le=BLOCK_SIZE_MAX)
    copies: list[Annotated[int, Field(ge=1, le=2**32 - 1)]] | None = Field(
        None, description="How many of each block there are now; 1 when absent."
    )
    lora_name: str | None = Field(None, description="The adapter of the context; the bare model when absent.")
    medium: str | None = Field(None, description="Where the blocks lie; GPU when absent.")
    group_idx: int | None = None
    owners: list[ClaimedBlocks] | None = Field(
        None, description="Whom blocks are stored for, beside `owner`."
    )


class RemovedEvent(BaseModel):
    """One copy of each of these blocks left its medium."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["BlockRemoved"]
    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class ClearedEvent(BaseModel):
    """The engine reset its prefix cache."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["AllBlocksCleared"]


class EventsFields(Body):
    """What is said of a batch beside its events."""

    pod: Name | None = Field(
        description="Null: every pod of `model`, for removals only, where pods agree on their engine hashes."
    )
    dp_rank: DpRank = 0
    model: Name | None = Field(None, description="Needed when the pod is not registered yet, or is null.")
    lora: Adapter | None = Field(None, description="Adapter of every event that names none.")
    seq: int | None = Field(
        None,
        ge=0,
        le=HASH_MAX,
        description="Sequence number: a batch seen before is left out, a gap is seen.",
    )
    ts: float | None = Field(
        None,
        ge=0,
        description="When the engine made the batch, in Unix seconds: the same when it is sent again.",
    )
    owner: Name | None = Field(
        None,
        description="Whom the blocks are stored for, an agent: fuzzy matches name it and can leave out its own.",
    )
    incomplete: bool = Field(
        False, description="The sender knows that something is missing: the rank is degraded from here on."
    )


class EventsRequest(EventsFields):
    """A batch of events of one rank, in order."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "pod": "pod-a",
                    "model": "m",
                    "seq": 42,
                    "events": [
                        {
                            "type": "BlockStored",
                            "block_hashes": [1],
                            "parent_block_hash": None,
                            "token_ids": [11, 12, 13, 14],
                            "block_size": 4,
                        },
                        {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"},
                    ],
                }
            ]
        }
    )

    events: list[StoredEvent | PrefixesEvent | RemovedEvent | ClearedEvent]


class RejectedEventRow(Body):
    """An event that was skipped."""

    index: int = Field(description="Its place in the batch.")
    reason: str = Field(description="One of a small fixed set.")
    detail: str


class EventsResponse(Body):
    """What the batch did; when it is answered, a match sees it."""

    accepted: int
    stored_blocks: int
    removed_blocks: int
    orphans: int = Field(description="Blocks that wait for a parent not seen yet.")
    ignored: int = Field(description="Events that say nothing about reusable prefixes.")
    rejected: list[RejectedEventRow]
    duplicate: bool = Field(description="The sequence number was seen before: nothing was stored or removed.")
