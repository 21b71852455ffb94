"""Which pod should a prompt go to?"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from app.schemas.fields import PODS_ASKED_MAX, Body, Name, PrefixHash, StateLabel
from app.schemas.match import HintResponse, TextFields
from app.schemas.prompts import PromptParts

PolicyName = Literal["longest_prefix", "prefix_and_load", "round_robin", "least_loaded"]
_Requests = Annotated[float, Field(ge=0, le=1e9)]


class LoadFields(Body):
    """What a pod says of itself, all its ranks together."""

    running: _Requests = Field(0.0, description="vllm:num_requests_running", examples=[3])
    waiting: _Requests = Field(0.0, description="vllm:num_requests_waiting", examples=[0])
    kv_usage: float = Field(0.0, ge=0, le=1, description="vllm:kv_cache_usage_perc", examples=[0.4])


class RouteFields(TextFields):
    """Which pod should a prompt go to? Without what is text or array."""

    loads: Annotated[dict[Name, LoadFields], Field(max_length=PODS_ASKED_MAX)] = Field(
        {},
        description="Loads by pod. Those of other pods are read from their metrics where they have a `metrics_url`, "
        "or else estimated from the choices made lately.",
        examples=[{"pod-a": {"running": 3, "waiting": 0, "kv_usage": 0.4}}],
    )
    policy: PolicyName = Field("prefix_and_load", description="How to choose.", examples=["prefix_and_load"])
    reserve: bool = Field(
        False, description="Announce the prompt for the chosen rank, as `/v1/prefixes` does.", examples=[True]
    )
    ttl_s: float = Field(2.0, gt=0, description="Seconds after which that announcement expires.")
    dry_run: bool = Field(
        False,
        description="Only look: nothing is announced, and the choice does not count as load of its pod.",
    )


class RouteRequest(PromptParts, RouteFields):
    """Which pod should this prompt go to?"""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "m",
                    "token_ids": [11, 12, 13, 14, 15],
                    "loads": {"pod-a": {"running": 3, "waiting": 0, "kv_usage": 0.4}},
                    "policy": "prefix_and_load",
                    "reserve": True,
                }
            ]
        }
    )


class CandidateRow(Body):
    """A rank that could have been chosen."""

    pod: str
    dp_rank: int
    score: float = Field(description="Higher is better; comparable within one answer.")
    matched_blocks: int
    speculative_blocks: int
    load: LoadFields | None = Field(description="What the choice went by; null when not known.")
    own_requests: float = Field(description="Choices of this service that the load does not have in it yet.")
    state: StateLabel | None = Field(description="Null for a pod that is not registered.")
    reason: str = Field(description="The same in words.")


class RouteResponse(Body):
    """The choice, and the best of the others."""

    pod: str
    dp_rank: int
    score: float
    policy: PolicyName
    model: str
    lora: str | None
    block_size: int
    tokens: int
    blocks: int
    reserved_blocks: int = Field(description="Blocks announced for the chosen rank.")
    hints: list[HintResponse] | None = Field(None, description="Those of the chosen rank, to be passed on.")
    candidates: list[CandidateRow] = Field(
        description="Best first, the chosen one in front; at most `top_k`, or 64."
    )
    prefix_hashes: list[PrefixHash] | None
