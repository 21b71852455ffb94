"""What the front asks the worker and what it is told, as msgpack arrays in frames of a length and a payload.

The parts of a prompt are passed on as they came, raw JSON or msgpack: the worker is the first to parse them.
"""

from __future__ import annotations

import enum
import struct

import msgspec

from app.observability.correlation import Correlation

LENGTH = struct.Struct("<I")  # of a payload, in bytes


class Prompt(msgspec.Struct, frozen=True, array_like=True):
    """Exactly one of `text` and `messages` is set. Bytes are values of `notation`, not parsed yet."""

    notation: str  # "json" or "msgpack"
    text: bytes | None = None
    messages: bytes | None = None
    tools: bytes | None = None
    template_arguments: bytes | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None  # None: as the engine does, yes for text and no for chat


class Job(msgspec.Struct, frozen=True, array_like=True):
    """`source` is the absolute path of a folder, or the name of a repository of the hub."""

    source: str
    tokens_max: int
    prompt: Prompt
    asked_by: Correlation | None = None  # the first request for it


class Fault(enum.StrEnum):
    REFUSED = "refused"  # this prompt cannot be tokenised, others of the model can
    UNUSABLE = "unusable"  # the model has no tokenizer that we can use; the operator has to do something
    UNAVAILABLE = "unavailable"  # it cannot be had now
    TOO_LONG = "too_long"  # more than `tokens_max` tokens


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """`token_ids` (uint32, little-endian) or a `fault`; how many tokenizers were loaded and let go for it."""

    token_ids: bytes = b""
    fault: Fault | None = None
    detail: str = ""
    field: str = ""
    loaded: int = 0
    evicted: int = 0
