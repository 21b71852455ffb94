"""The parts of a running service, how they start, and how they end.

Start: keys first; then what is to be known before the first answer (a snapshot, the pods); then whatever hears and
asks. While a snapshot is read, probes are answered already (app/start.py). End, in the other order: nothing new comes
in, leases are given up so that another replica goes on at once, what is under way is finished, and the last snapshot
is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from app.auth.key_ring import KeyRing
from app.config import Settings
from app.discovery.discovery import Discovery
from app.ingest.zmq import ZmqIngest
from app.metrics.metrics import Metrics
from app.observability.tracing import Spans
from app.pods import PodSpec
from app.readiness import Readiness
from app.routing.loads import Loads
from app.routing.router import Router
from app.service import IndexerService
from app.service.writers import Writer
from app.serving.connections import ConnectionLimits
from app.snapshots.keeper import SnapshotKeeper
from app.start import Start
from app.tokenizer.front import Tokenizer

if TYPE_CHECKING:
    from app.replication.replica import Replica

logger = logging.getLogger(__name__)

_REST_S = 0.1  # between two looks at the deadlines while nothing is swept


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """`snapshots` are those in a file, and there are none beside a `replica`; `specs` are the configured pods."""

    settings: Settings
    service: IndexerService
    specs: list[PodSpec]
    start: Start
    keys: KeyRing
    connections: ConnectionLimits
    snapshots: SnapshotKeeper | None
    replica: Replica | None
    writer: Writer
    ingest: ZmqIngest
    loads: Loads
    router: Router
    discovery: Discovery
    readiness: Readiness
    tokenizer: Tokenizer
    metrics: Metrics
    spans: Spans | None


@contextlib.asynccontextmanager
async def running(parts: Parts) -> AsyncIterator[None]:
    """The service runs inside."""
    parts.keys.start()
    await parts.start.run(_begin(parts), aside=parts.snapshots is not None)
    timer = asyncio.create_task(_tick(parts), name="tick")
    try:
        yield
    finally:
        await parts.start.stop()
        timer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await timer
        await _end(parts)


async def _begin(parts: Parts) -> None:
    if parts.snapshots is not None:
        for spec in await parts.snapshots.restore():
            parts.readiness.wait_for(spec)
        parts.snapshots.start()
    if parts.replica is not None:
        parts.replica.start(parts.specs)
    parts.ingest.start()
    parts.loads.start()
    parts.discovery.start()
    parts.readiness.begin()


async def _end(parts: Parts) -> None:
    await parts.discovery.stop()
    await parts.keys.stop()
    await parts.loads.stop()
    await parts.tokenizer.close()
    if parts.replica is not None:
        await parts.replica.following.stop()
    parts.ingest.stop()
    if parts.replica is not None:
        await parts.replica.stop(parts.settings.shutdown_grace_s)
    if parts.snapshots is not None and parts.start.is_over:
        await parts.snapshots.stop(parts.settings.snapshot_grace_s)
    if parts.spans is not None:
        await asyncio.to_thread(parts.spans.close)


async def _tick(parts: Parts) -> None:
    interval_s = parts.settings.sweep_interval_s
    while True:
        # A process that is woken up from rest pays several times what its slice costs.
        await asyncio.sleep(max(interval_s, _REST_S) if parts.service.is_at_rest else interval_s)
        if not parts.start.is_over:
            continue
        try:
            for _ in parts.service.tick_parts():
                await asyncio.sleep(0)  # others have their turn
        except Exception:  # the outermost loop of this task: it must outlive one bad slice, and say so
            logger.exception("a timer slice failed")
            parts.metrics.observe_failed_tick()
