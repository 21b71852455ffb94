"""The bodies of the HTTP contract, shared by the service, its OpenAPI document and the client.

Numbers that come by the thousand (token ids, hashes) are declared here for the document and for clients,
and never validated one by one by these models: the service cuts them out of the raw body
(app/api/bodies.py) and validates only the small fields. That is why a request with arrays has two classes:
`MatchFields` is what is validated, `MatchRequest` the whole that a sender writes.

Unknown fields are refused everywhere except inside events, where engines add fields with every release.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

NAME_CHARS_MAX = 1_024
PODS_ASKED_MAX = 10_000
BLOCK_SIZE_MAX = 65_536
DP_RANK_MAX = 65_535
TOKEN_ID_MAX = 2**32 - 1
HASH_MAX = 2**64 - 1

Name = Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX, pattern=r"^[^\x00-\x1f\x7f]+$")]
_AdapterName = Annotated[str, Field(max_length=NAME_CHARS_MAX, pattern=r"^[^\x00-\x1f\x7f]*$")]
_AdapterNumber = Annotated[int, Field(ge=0, le=2**63 - 1)]


def _adapter_name(value: Any) -> Any:
    """Events of engines that number their adapters and publish no names have the number for a name."""
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    return str(value) if fits else value


Adapter = Annotated[
    _AdapterName,
    BeforeValidator(_adapter_name, json_schema_input_type=_AdapterName | _AdapterNumber),
    Field(
        description="LoRA adapter by name, or by number where the engine's events have no name; none when empty.",
        examples=["sql-adapter"],
    ),
]
TokenId = Annotated[int, Field(ge=0, le=TOKEN_ID_MAX)]
PrefixHash = Annotated[int, Field(ge=0, le=HASH_MAX)]
EngineHash = Annotated[
    int | str,
    Field(description="The engine's name for a block: signed or unsigned 64 bits, or bytes as hex."),
]
BlockSize = Annotated[int, Field(ge=1, le=BLOCK_SIZE_MAX)]
DpRank = Annotated[int, Field(ge=0, le=DP_RANK_MAX)]
TierLabel = Literal["gpu", "cpu", "disk", "external"]
StateLabel = Literal["live", "catching_up", "degraded", "down"]


Endpoint = Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)]


class Body(BaseModel):
    """Base of all: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# -- problems


class Fault(Body):
    """One fault of a request."""

    field: str = Field(description="Its place as a dotted path; empty when it is the whole.")
    detail: str


class Problem(BaseModel):
    """RFC 9457 problem object."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str
    title: str
    status: int
    detail: str
    errors: list[Fault]
    bound: str | None = Field(None, description="The setting whose bound was met.")
    request_id: str | None = Field(
        None, description="The `X-Request-ID` of the answer; the indexer's log has it too."
    )


# -- events


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
    blocks: list[EngineHash] = Field(description="Of `block_hashes`; others count for nothing.")


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
        description="Sequence number: a batch seen before changes nothing, a gap is seen.",
    )
    ts: float | None = Field(None, description="The engine's Unix time in seconds.")
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
    duplicate: bool = Field(description="The sequence number was seen before; nothing changed.")


# -- queries


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


_TOKEN_IDS = Field(None, description="The prompt's token ids.")
_PREFIX_HASHES = Field(None, description="Instead of token ids: prefix hashes, as `/v1/hashes` gives them.")
_EXTRA_KEYS = Field(
    None,
    description="A list a block of what else makes it differ (image hashes ...); fewer than blocks will do.",
)


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


class PromptParts(BaseModel):
    """A prompt: exactly one of `token_ids`, `prefix_hashes`, `text` and `messages`, and what belongs to it."""

    token_ids: list[TokenId] | None = _TOKEN_IDS
    prefix_hashes: list[PrefixHash] | None = _PREFIX_HASHES
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
    extra_keys: list[list[Any] | None] | None = _EXTRA_KEYS


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


EXCLUDED_MAX = 1_024
FUZZY_DISTANCE_MAX = 8
FUZZY_MATCHES_MAX = 256


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

    token_ids: list[TokenId] | None = _TOKEN_IDS
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


class OwnerRow(Body):
    """An agent that blocks were stored for."""

    owner: str
    blocks: int = Field(
        description="Its blocks, counted on every rank and tier; dead ones until they are swept."
    )


class OwnersResponse(Body):
    """Owners, by name."""

    owners: list[OwnerRow]


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


class HashesRequest(PromptFields):
    """The prompt whose prefix hashes are asked for."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "m", "token_ids": [11, 12, 13, 14]}]})

    token_ids: list[TokenId]
    extra_keys: list[list[Any] | None] | None = _EXTRA_KEYS


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

    token_ids: list[TokenId] | None = _TOKEN_IDS
    prefix_hashes: list[PrefixHash] | None = _PREFIX_HASHES
    extra_keys: list[list[Any] | None] | None = _EXTRA_KEYS


class PrefixesResponse(Body):
    """How many blocks are announced now: not those that the rank holds or that found no room."""

    added: int


# -- pods


class PodRequest(Body):
    """What the operator says about a pod. Rank r is found at each endpoint's port + r."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "m",
                    "block_size": 16,
                    "zmq_endpoint": "tcp://10.0.0.7:5557",
                    "replay_endpoint": "tcp://10.0.0.7:5558",
                }
            ]
        }
    )

    model: Name
    lora: Adapter | None = None
    block_size: BlockSize | None = Field(
        None, description="Tokens a block; taken from the first event when absent."
    )
    zmq_endpoint: Endpoint | None = Field(
        None, description="Where rank 0 publishes; none: its events come by HTTP."
    )
    replay_endpoint: Endpoint | None = Field(None, description="Where rank 0 replays what was missed.")
    topic: Annotated[str, Field(max_length=NAME_CHARS_MAX)] = ""
    dp_size: int = Field(1, ge=1, le=DP_RANK_MAX + 1, description="Data-parallel ranks.")
    metrics_url: Endpoint | None = Field(
        None,
        description="Where its Prometheus metrics are, if `/v1/route` is to know its load.",
        examples=["http://10.0.0.7:8000/metrics"],
    )


class RankResponse(Body):
    """One rank of a pod."""

    dp_rank: int
    state: StateLabel
    cause: str = Field(description="Why it is in this state, as last told; empty while nothing was.")
    last_seq: int | None = Field(description="Newest sequence number that a match already sees.")
    last_event_age_s: float | None
    blocks: dict[str, int] = Field(description="Blocks held, by tier.")
    gaps: int
    replays: int
    restarts: int
    orphans: int
    rejected: int


class PodResponse(Body):
    """A registered pod."""

    pod: str
    model: str
    lora: str | None
    block_size: int | None
    zmq_endpoint: str | None
    replay_endpoint: str | None
    topic: str
    dp_size: int
    metrics_url: str | None
    discovered_by: str | None = Field(None, description="Place of discovery that keeps it registered.")
    ranks: list[RankResponse]


class RemoveFields(Body):
    """Which of a pod's blocks to forget; everything where nothing is said."""

    model: Name | None = None
    lora: Adapter | None = None
    dp_rank: DpRank | None = None
    tier: TierLabel | None = None


class PodsResponse(Body):
    """Every registered pod, by name."""

    pods: list[PodResponse]


class RemovedResponse(Body):
    """How many blocks were forgotten."""

    removed_blocks: int


# -- operations


class DumpFields(Body):
    """What to dump; everything where nothing is said."""

    pods: Annotated[list[Name], Field(max_length=PODS_ASKED_MAX)] | None = Field(
        None, description="Only these pods."
    )


class HealthResponse(Body):
    """The process answers."""

    status: Literal["ok"]
    version: str


class PlaceResponse(Body):
    """A place that knows pods: a file, a DNS name, a label selector of Kubernetes."""

    place: str
    state: Literal["starting", "working", "failing"] = Field(description="Failing: its last picture is kept.")
    cause: str = Field(description="Why; empty when it works.")
    seen_age_s: float | None = Field(description="Seconds since its last picture.")
    pods: dict[str, int] = Field(description="`registered`, `waiting`, `vanished` and `refused` ones.")
    waiting: dict[str, str] = Field(description="Pods that are not registered yet, and why.")
    looks: dict[str, int]
    changes: dict[str, int]


class StatsResponse(BaseModel):
    """Figures since the start; more may be added."""

    model_config = ConfigDict(extra="allow", frozen=True)

    uptime_s: float
    digest: str = Field(description="Of who holds which prefix on which tier, whatever the order it came in.")
    pods: int
    sources: dict[str, int] = Field(description="Ranks by state.")
    events: dict[str, int] = Field(description="Events applied, by type, of the pods that are registered.")
    rejected: dict[str, int] = Field(description="Events skipped, by reason.")
    queries: dict[str, int]
    index: dict[str, int]
    discovery: list[PlaceResponse] = Field([], description="How each place of discovery goes.")
