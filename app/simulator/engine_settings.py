"""What an engine can be told, and the time that its steps take.

TimeModel's constants are round figures for an 8B model in 16 bits on one accelerator of the 2024 class: a
step costs 8 ms (reading the weights), 0.1 ms more for each token of a prompt (10,000 tokens/s), 0.2 ms for
each decoding sequence and 0.01 ms for each token loaded from host memory. They give curves their shape;
they are no claim about any product.
"""

from __future__ import annotations

import dataclasses

from app.simulator.connector import ConnectorSettings
from app.simulator.kv_cache import KVCacheSettings
from app.simulator.offload import OffloadSettings


@dataclasses.dataclass(frozen=True, slots=True)
class TimeModel:
    """Seconds of simulated time."""

    step_s: float = 0.008
    prefill_s_per_token: float = 0.0001
    decode_s_per_sequence: float = 0.0002
    load_s_per_token: float = 0.00001


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSettings:
    """`offload` None: no tier behind the GPU. `connector` None: no metadata beside blocks.

    `draft_tokens`: speculative tokens that a decoding step tries.
    """

    cache: KVCacheSettings = dataclasses.field(default_factory=KVCacheSettings)
    time: TimeModel = dataclasses.field(default_factory=TimeModel)
    offload: OffloadSettings | None = None
    connector: ConnectorSettings | None = dataclasses.field(default_factory=ConnectorSettings)
    running_max: int = 256
    waiting_max: int = 1_024
    step_tokens_max: int = 8_192
    draft_tokens: int = 0
    vocabulary: int = 32_000
