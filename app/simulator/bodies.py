"""Bodies of the OpenAI-compatible routes: what is read of a request, and how an answer looks.

Only what changes the cache or the length of an answer is read; sampling parameters are accepted and
ignored, as every answer is made up. A simulated pod understands two additions of vLLM (`cache_salt`,
`vllm_xargs.kv_cache_report_mode`) and carries the connector's hints in `kv_transfer_params`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from app.errors import InvalidInput

AnyPrompt = str | list[int | str | list[int]]


class ReportMode(msgspec.Struct):
    kv_cache_report_mode: str | None = None


class TransferParameters(msgspec.Struct):
    """Whose prompt it is, and what a router has learned of its prefix."""

    agent_id: str | None = None
    workflow_step: int | None = None
    cla_group: int | None = None
    offset_hint: list[float] | None = None
    hints: list[dict[str, Any]] | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Common(msgspec.Struct, kw_only=True):
    """What completions and chat completions share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    vllm_xargs: ReportMode | None = None
    kv_transfer_params: TransferParameters | None = None
    return_token_ids: bool = False


class CompletionBody(Common, kw_only=True):
    prompt: AnyPrompt
    max_tokens: int | None = None


class ContentPart(msgspec.Struct):
    type: str
    text: str = ""


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content if part.type == "text")


class ChatBody(Common, kw_only=True):
    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class TokenizeBody(msgspec.Struct):
    prompt: str | None = None
    messages: list[Message] | None = None


class FaultsBody(msgspec.Struct, forbid_unknown_fields=True):
    """Each field that is given is applied, to one rank or to all of them."""

    dp_rank: int | None = None
    drop_next: int | None = None
    duplicate_next: int | None = None
    lag_s: float | None = None
    truncate_replays: int | msgspec.UnsetType | None = msgspec.UNSET
    action: Literal["crash", "start", "restart_in_place"] | None = None


def single_prompt(prompt: AnyPrompt) -> str | list[int]:
    """Text or tokens, bare or in a list of one; several prompts at once are refused."""
    if isinstance(prompt, str):
        return prompt
    token_ids = [token for token in prompt if isinstance(token, int)]
    if len(token_ids) == len(prompt):
        return token_ids
    only = prompt[0]
    if len(prompt) > 1 or isinstance(only, int):
        raise InvalidInput("one prompt a request: text, or a list of token ids", field="prompt")
    return only


def usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def error_body(message: str, kind: str, status: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
