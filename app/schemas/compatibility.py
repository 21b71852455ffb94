"""Bodies of the compatibility routes, as Mooncake's conductor, Dynamo's indexer and LMCache's controller have them.

Their words stand here as they are (instance, tenant), and so do both spellings where two systems differ
(`model_name`, `modelname`, `model`). Routers that exist send what they send, so unknown fields are ignored on these
routes and on no others; docs/compatibility.md says which ones that concerns and what it costs.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.schemas.fields import (
    HASH_MAX,
    NAME_CHARS_MAX,
    Adapter,
    BlockSize,
    Body,
    DpRank,
    Endpoint,
    Name,
    TokenId,
)

InstanceId = Annotated[int, Field(ge=0, le=HASH_MAX)] | Name
Tenant = Annotated[str, Field(max_length=NAME_CHARS_MAX, pattern=r"^[^\x00-\x1f\x7f]*$")]
SignedHash = Annotated[int, Field(ge=-(2**63), le=HASH_MAX)]


class ForeignBody(BaseModel):
    """Base of what routers of other systems send: unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class PartitionFields(ForeignBody):
    """Whose instances, of which model."""

    model_name: Name | None = Field(None, description="The model, as Dynamo spells it.")
    modelname: Name | None = Field(None, description="The same, as Mooncake spells it in /register.")
    model: Name | None = Field(None, description="The same, as Mooncake spells it in /query.")
    tenant_id: Tenant | None = Field(
        None, description="Tenants never see each other; `default` when absent or empty."
    )
    routing_group: Tenant | None = Field(None, description="As `tenant_id`, and beside it: Dynamo's word.")
    lora_name: Adapter | None = None


class RegisterRequest(PartitionFields):
    """One rank of an instance, and where it publishes its events."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "instance_id": 7,
                    "endpoint": "tcp://10.0.0.7:5557",
                    "replay_endpoint": "tcp://10.0.0.7:5558",
                    "model_name": "m",
                    "block_size": 16,
                    "dp_rank": 0,
                },
                {
                    "instance_id": "engine-a",
                    "endpoint": "tcp://10.0.0.8:5557",
                    "type": "vLLM",
                    "modelname": "m",
                    "lora_name": "",
                    "tenant_id": "acme",
                    "block_size": 16,
                    "dp_rank": 1,
                },
            ]
        }
    )

    instance_id: InstanceId
    endpoint: Endpoint
    replay_endpoint: Annotated[str, Field(max_length=NAME_CHARS_MAX)] | None = None
    block_size: BlockSize | None = None
    dp_rank: DpRank | None = None
    type: str | None = Field(None, description="The engine. `Mooncake`, a store and no engine, is refused.")


class RegisterResponse(Body):
    """Registered: a match sees the rank's blocks as soon as they are replayed or published."""

    status: str
    instance_id: int | str


class UnregisterRequest(PartitionFields):
    """One rank of an instance, or all of them where no rank is named."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"instance_id": 7, "model_name": "m"},
                {"instance_id": "engine-a", "tenant_id": "acme", "dp_rank": 1},
            ]
        }
    )

    instance_id: InstanceId
    dp_rank: DpRank | None = None


class UnregisterResponse(Body):
    """Forgotten, with all that it held."""

    status: str
    removed_instances: list[str] = Field(description="`<instance>|<tenant>|<rank>` of each.")


class QueryFields(PartitionFields):
    """A query without its arrays."""

    instance_id: InstanceId | None = Field(None, description="Only this instance.")
    cache_salt: Annotated[str, Field(max_length=NAME_CHARS_MAX)] | None = None
    block_size: BlockSize | None = Field(None, description="Of the hashes; of no matter for token ids.")


class QueryRequest(QueryFields):
    """How many tokens of this prompt does each instance hold?"""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model_name": "m", "token_ids": [11, 12, 13, 14, 15]},
                {
                    "model": "m",
                    "block_size": 4,
                    "token_ids": [11, 12, 13, 14, 15],
                    "tenant_id": "acme",
                    "cache_salt": None,
                },
            ]
        }
    )

    token_ids: list[TokenId]


class QueryByHashRequest(QueryFields):
    """The same, by the prefix hashes of this service (`/v1/hashes`); signed or unsigned."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model_name": "m", "block_hashes": [5, -6]}, {"model": "m", "seq_hashes": [5, 6]}]
        }
    )

    block_hashes: list[SignedHash] | None = None
    seq_hashes: list[SignedHash] | None = Field(None, description="The same, as Mooncake spells it.")


class RankMatches(Body):
    """Tokens on each tier, cumulative from fast to slow."""

    gpu: int
    cpu: int
    disk: int


class InstanceMatch(RankMatches):
    """Tokens of the prompt that an instance holds: the largest of its ranks."""

    longest_matched: int
    dp: dict[str, int] = Field(description="Tokens on the GPU, by rank.")
    rank_matches: dict[str, RankMatches]


class QueryResponse(Body):
    """Tokens by instance; instances without a match are left out."""

    scores: dict[str, dict[str, int]] = Field(
        description="Instance -> rank -> tokens on the GPU, where there are any."
    )
    frequencies: list[int] = Field(description="Always empty.")
    instances: dict[str, InstanceMatch]


class ListenerRow(Body):
    """The event stream of one rank."""

    endpoint: str = Field(description="Empty when the rank posts its events.")
    status: Literal["active", "pending", "failed"]
    state: str = Field(description="The trust state, as in `/v1/pods`.")


class WorkerRow(Body):
    """An instance with its ranks."""

    instance_id: int | str
    source: Literal["zmq", "http"]
    status: Literal["active", "pending", "failed"]
    model_name: str
    tenant_id: str
    routing_group: str
    block_size: int | None
    endpoints: dict[str, str]
    listeners: dict[str, ListenerRow]


class ServiceRow(Body):
    """One registered rank, in the letters of Mooncake's conductor."""

    Endpoint: str
    ReplayEndpoint: str
    Type: str
    ModelName: str
    LoraName: str
    TenantID: str
    InstanceID: str
    BlockSize: int | None
    DPRank: int
    CacheGroup: None = None
    HashProfile: None = Field(None, description="None is needed: engine hashes are opaque here.")


class ServicesResponse(Body):
    """Every registered rank."""

    count: int
    services: list[ServiceRow]


class ContextRow(Body):
    """A cache-sharing scope."""

    model_name: str
    lora_name: str
    block_size: int
    tenant_id: str
    prefix_count: int
    hash_profile: None = None
    instances: dict[str, list[int]] = Field(description="Ranks by instance.")


class GlobalViewResponse(Body):
    """Every context that has been spoken of, with the instances of its model."""

    context_count: int
    contexts: list[ContextRow]


class LookupFields(PartitionFields):
    """A lookup without its tokens."""

    cache_salt: Annotated[str, Field(max_length=NAME_CHARS_MAX)] | None = None


class LookupRequest(LookupFields):
    """LMCache's question: which instance has the longest leading part of these tokens, and where?"""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [11, 12, 13, 14, 15]}]})

    tokens: list[TokenId]


class LookupResponse(Body):
    """Instance -> [tier, tokens]; the most tokens first."""

    event_id: str
    layout_info: dict[str, Annotated[list[str | int], Field(min_length=2, max_length=2)]]
