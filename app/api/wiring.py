"""What the handlers work with, put together once by app/main.py and found through the request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

from fastapi import FastAPI, Request

from app._native import PlainBatch
from app.config import Settings
from app.ingest.vllm import plain_batch
from app.metrics.metrics import Metrics
from app.routing.router import Router
from app.service import IndexerService
from app.service.writers import Writer
from app.serving.connections import ConnectionLimits
from app.tokenizer.front import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Wiring:
    """`not_ready` names what the process still waits for as (place, sentence); empty when it is ready. What changes
    the picture goes through `writer`; `replication` are the figures of /v1/stats, None in a lone process."""

    settings: Settings
    service: IndexerService
    writer: Writer
    metrics: Metrics
    clock: Callable[[], float]
    not_ready: Callable[[], list[tuple[str, str]]]
    router: Router
    tokenizer: Tokenizer
    connections: ConnectionLimits
    replication: Callable[[], dict[str, Any]] | None = None
    discovery: Callable[[], list[dict[str, Any]]] = list  # how each place goes
    plain: PlainBatch = dataclasses.field(default_factory=plain_batch)  # read anew for each posted batch


def attach(app: FastAPI, wiring: Wiring) -> None:
    app.state.wiring = wiring


def wired(app: FastAPI) -> Wiring:
    return cast(Wiring, app.state.wiring)


def wiring_of(request: Request) -> Wiring:
    return wired(request.app)
