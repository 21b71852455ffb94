"""Types of single fields with their bounds, and the base of bodies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from app.schemas.bounds import BLOCK_SIZE_MAX, TOKEN_ID_MAX

NAME_CHARS_MAX = 1_024
PODS_ASKED_MAX = 10_000
DP_RANK_MAX = 65_535
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
