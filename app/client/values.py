"""What a client sends and gets, as plain values: the contract of docs/api.md, typed.

Unknown fields of answers are ignored, so an indexer may be newer than its clients. `degraded` is set
by the client itself: the indexer was not asked, did not answer in time, or knows no such pod, and `cause` says why.
Such an answer is empty, and a router goes on with whatever it does for a prompt that nobody has.
"""

from __future__ import annotations

import array
import sys
from typing import Any

import msgspec

from app.errors import InvalidInput
from app.extra_keys import query_extra_keys


class Prompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of `token_ids`, `prefix_hashes`, `text` and `messages`; the rest says in which context.

    `extra_keys` are those of each block as the engine publishes them; a salt goes into `cache_salt`.
    """

    model: str
    lora: str | None = None
    cache_salt: str | None = None
    block_size: int | None = None
    token_ids: list[int] | None = None
    prefix_hashes: list[int] | None = None
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    extra_keys: list[list[Any] | None] | None = None

    def hashed(self) -> Prompt:
        """The same prompt by prefix hashes, computed here: a sixteenth of the bytes, and no token leaves the router.

        Raises InvalidInput without `token_ids` or `block_size`, and NativeCoreMissing.
        """
        # Only who hashes here needs the compiled core.
        from app import hashing

        if self.token_ids is None or self.block_size is None:
            raise InvalidInput("hashing needs token_ids and block_size", field="token_ids")
        try:
            tokens = _little_endian(array.array("I", self.token_ids))
        except (OverflowError, TypeError) as error:
            raise InvalidInput(f"token_ids: {error}", field="token_ids") from error
        keys = query_extra_keys(self.extra_keys, lora=self.lora or None, cache_salt=self.cache_salt)
        packed = hashing.prefix_hashes(self.model, self.lora, self.block_size, tokens, keys)
        hashes = array.array("Q")
        hashes.frombytes(packed)
        if sys.byteorder == "big":
            hashes.byteswap()
        return Prompt(
            model=self.model, lora=self.lora, block_size=self.block_size, prefix_hashes=hashes.tolist()
        )


class Load(msgspec.Struct, frozen=True):
    """How busy a pod is, as the router knows it."""

    running: float = 0
    waiting: float = 0
    kv_usage: float = 0.0


class Hint(msgspec.Struct, frozen=True):
    """What an engine said of a block beside its tokens; `tokens` is where the block ends in the prompt."""

    block: int
    tier: str
    tokens: int
    metadata: dict[str, Any]


class MatchRow(msgspec.Struct, frozen=True):
    """How much of the prompt one rank of one pod holds, and how far that can be trusted."""

    pod: str
    dp_rank: int
    matched_blocks: int
    matched_tokens: int
    reusable_tokens: int
    percent: float
    tiers: dict[str, int]
    state: str
    speculative_blocks: int = 0
    last_event_age_s: float | None = None
    hints: tuple[Hint, ...] | None = None


class MatchAnswer(msgspec.Struct, frozen=True):
    """Best first."""

    model: str
    lora: str | None = None
    block_size: int = 0
    tokens: int = 0
    blocks: int = 0
    matches: tuple[MatchRow, ...] = ()
    prefix_hashes: tuple[int, ...] | None = None
    degraded: bool = False
    cause: str = ""

    @property
    def best(self) -> MatchRow | None:
        return self.matches[0] if self.matches else None


class Candidate(msgspec.Struct, frozen=True):
    """A rank that was considered, and why it stands where it does."""

    pod: str
    score: float
    dp_rank: int = 0
    matched_blocks: int = 0
    speculative_blocks: int = 0
    load: Load | None = None
    own_requests: float = 0.0
    state: str | None = None
    reason: str = ""


class RouteAnswer(msgspec.Struct, frozen=True):
    """The chosen rank; `pod` is None when the router has to choose by itself."""

    pod: str | None = None
    dp_rank: int = 0
    score: float = 0.0
    policy: str = ""
    block_size: int = 0
    tokens: int = 0
    blocks: int = 0
    reserved_blocks: int = 0
    hints: tuple[Hint, ...] | None = None
    candidates: tuple[Candidate, ...] = ()
    degraded: bool = False
    cause: str = ""


class PrefixesAnswer(msgspec.Struct, frozen=True):
    """Blocks that are announced now."""

    added: int = 0
    degraded: bool = False
    cause: str = ""


class RejectedEvent(msgspec.Struct, frozen=True):
    """An event that was skipped."""

    index: int
    reason: str
    detail: str = ""


class EventsAnswer(msgspec.Struct, frozen=True):
    """What a batch did."""

    accepted: int
    stored_blocks: int
    removed_blocks: int
    orphans: int = 0
    ignored: int = 0
    rejected: tuple[RejectedEvent, ...] = ()
    duplicate: bool = False


class Rank(msgspec.Struct, frozen=True):
    """One rank of a pod."""

    dp_rank: int
    state: str
    last_seq: int | None = None
    last_event_age_s: float | None = None
    blocks: dict[str, int] = {}
    gaps: int = 0
    replays: int = 0
    restarts: int = 0
    orphans: int = 0
    rejected: int = 0


class PodAnswer(msgspec.Struct, frozen=True):
    """A registered pod."""

    pod: str
    model: str
    lora: str | None = None
    block_size: int | None = None
    zmq_endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""
    dp_size: int = 1
    ranks: tuple[Rank, ...] = ()


class PodsAnswer(msgspec.Struct, frozen=True):
    pods: tuple[PodAnswer, ...]


def _little_endian(values: array.array[int]) -> bytes:
    assert values.itemsize == 4, "token ids are 32-bit"
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
