"""The only place where things are wired together: settings in, an ASGI application out.

The event loop's thread is the one writer. The ZMQ ingest receives on a thread of its own and hands whole
batches to the loop; a timer gives the service its slices of expiry. Start: pods are registered before the first request
is served, so a router never sees an indexer that does not know its own configuration; while a snapshot is read, only
probes are answered. End: requests are finished, streams left, then the last snapshot is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from app import __version__
from app.api import (
    compatibility,
    compatible_queries,
    document,
    events,
    fuzzy,
    match,
    operations,
    owners,
    pages,
    pods,
    prefixes,
    problems,
    route,
    streams,
)
from app.api.observation import RequestObservation
from app.api.short_way import ShortWay
from app.api.starting import Starting
from app.api.wiring import Wiring, attach
from app.config import Settings
from app.errors import IndexerError, InvalidInput, InvalidSettings
from app.events import EventBatch
from app.fuzzy.fuzzy_index import FuzzyIndex
from app.fuzzy_queries import fuzzy_index
from app.index.prefix_index import PrefixIndex
from app.ingest.feed import QueueLimits
from app.ingest.receiver import SocketLimits
from app.ingest.registry import parse_pod, read_pods_file
from app.ingest.sequence import SequenceLimits
from app.ingest.vllm import decode_batch
from app.ingest.zmq import ZmqIngest, ZmqSettings
from app.loads import Loads
from app.metrics import Figures, Metrics
from app.pods import PodSpec
from app.readiness import Readiness
from app.router import Router
from app.service import IndexerService, index_limits
from app.snapshots.file import FileStore
from app.snapshots.keeper import SnapshotKeeper
from app.start import Start
from app.tokenizer.front import Tokenizer
from app.tracing import Spans, open_spans
from app.writers import DirectWriter, Writer

if TYPE_CHECKING:
    from app.replication.replica import Replica

logger = logging.getLogger(__name__)

DESCRIPTION = "Which pod already holds the KV cache of the longest leading part of a prompt?"


class Application(FastAPI):
    """FastAPI behind `front`: the framework's own layers cost more than a match, so they are not before it."""

    front: ASGIApp
    start: Start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front(scope, receive, send)

    async def framework(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)


def create_app(settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> Application:
    """Raises InvalidSettings for configured pods that cannot be."""
    specs = _configured_pods(settings)
    contents = fuzzy_index(settings)
    index = PrefixIndex(index_limits(settings), contents)
    service = IndexerService(settings, index, clock=clock, contents=contents)
    snapshots = _snapshots(settings, service, index, specs)
    replica = None if settings.redis_url is None else _replica(settings, service, contents)
    writer: Writer = DirectWriter(service) if replica is None else replica.writer
    loads = Loads(settings, pods=lambda: [pod.spec for pod in service.pods.values()], clock=clock)
    router = Router(settings, service, clock=clock, polled=loads.load)
    tokenizer = Tokenizer(
        settings,
        serves=lambda model: any(pod.spec.model == model for pod in service.pods.values()),
        clock=clock,
    )
    metrics = Metrics(
        Figures(
            stats=service.stats,
            pods=lambda: service.pods.values(),
            gauges=lambda: ingest.gauges(),
            counters=lambda: ingest.counters(),
            parts={
                "tokenizer": (tokenizer.gauges, tokenizer.counters),
                "loads": (loads.gauges, loads.counters),
                "route": (dict, router.counters),
                "replication": (replica.gauges, replica.counters) if replica else (dict, dict),
                "snapshot": (snapshots.gauges, snapshots.counters) if snapshots else (dict, dict),
                "fuzzy": (service.fuzzy.gauges, service.fuzzy.counters),
                "owners": (service.owners.gauges, service.owners.counters),
            },
            clock=clock,
        )
    )
    ingest = ZmqIngest(service, _zmq_settings(settings), decode=functools.partial(_decode, metrics))
    if replica is None:
        service.listeners.append(ingest)
    for spec in specs:
        try:
            if replica is None:
                service.register(spec)
            else:
                service.check_spec(spec)
        except IndexerError as error:
            raise InvalidSettings(f"pod {spec.name!r}: {error}") from error
    spans = open_spans(settings)
    readiness = Readiness(service, specs, clock=clock, grace_s=settings.ready_grace_s)
    start = Start()
    app = Application(
        title="kvindexer",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lambda _app: _lifespan(
            settings,
            service,
            ingest,
            metrics,
            readiness,
            loads,
            tokenizer,
            snapshots,
            start,
            spans,
            replica,
            specs,
        ),
    )
    app.start = start
    wiring = Wiring(
        settings,
        service,
        writer,
        metrics,
        clock,
        lambda: readiness.missing() + (replica.missing() if replica else []),
        router,
        tokenizer,
        replica.stats if replica else None,
    )
    attach(app, wiring)
    for resource in (
        events,
        match,
        fuzzy,
        owners,
        route,
        prefixes,
        pods,
        operations,
        streams,
        compatibility,
        compatible_queries,
    ):
        app.include_router(resource.router)
    # From the inside out. What must hold for every request (metrics; a check of keys, when there is one) stands
    # outside of the short way, so that no request can go around it.
    app.front = RequestObservation(
        Starting(ShortWay(app.framework, wiring=wiring), start),
        metrics=metrics,
        access_log_every=settings.access_log_every,
        spans=spans,
    )
    pages.install(app)
    problems.install(app)
    document.install(app)
    return app


def _snapshots(
    settings: Settings, service: IndexerService, index: PrefixIndex, specs: list[PodSpec]
) -> SnapshotKeeper | None:
    path = settings.snapshot_path
    if path is None:
        return None
    if settings.redis_url is not None:
        raise InvalidSettings(
            "snapshot_path and redis_url exclude each other: a file does not know its place in the log"
        )
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidSettings(f"snapshot_path={str(path)!r}: must be a file in a folder that is there")
    return SnapshotKeeper(
        service,
        index,
        FileStore(path),
        configured=frozenset(spec.name for spec in specs),
        interval_s=settings.snapshot_interval_s,
    )


def _configured_pods(settings: Settings) -> list[PodSpec]:
    try:
        specs = [parse_pod(text) for text in settings.pods]
        if settings.pods_file is not None:
            specs += read_pods_file(settings.pods_file)
    except InvalidInput as error:
        raise InvalidSettings(str(error)) from error
    counts = Counter(spec.name for spec in specs)
    for name, count in counts.items():
        if count > 1:
            raise InvalidSettings(f"pod {name!r} is configured {count} times")
    return specs


def _decode(metrics: Metrics, payload: bytes, *, block_size: int | None = None) -> EventBatch:
    batch = decode_batch(payload, block_size=block_size)
    if batch.ts is not None:
        metrics.observe_lag(time.time() - batch.ts)
    return batch


def _zmq_settings(settings: Settings) -> ZmqSettings:
    return ZmqSettings(
        sequence=SequenceLimits(disconnect_deadline_s=settings.zmq_disconnect_deadline_s),
        queue=QueueLimits(
            queue_batches_max=settings.zmq_queue_batches_max, queue_bytes_max=settings.zmq_queue_bytes_max
        ),
        sockets=SocketLimits(
            message_bytes_max=settings.zmq_message_bytes_max, held_bytes_max=settings.zmq_held_bytes_max
        ),
    )


def _replica(settings: Settings, service: IndexerService, contents: FuzzyIndex | None) -> Replica:
    # Redis's client takes a quarter of a second to import: only who has a Redis pays for it.
    from app.replication.replica import Replica

    return Replica(settings, service, contents)


@contextlib.asynccontextmanager
async def _lifespan(
    settings: Settings,
    service: IndexerService,
    ingest: ZmqIngest,
    metrics: Metrics,
    readiness: Readiness,
    loads: Loads,
    tokenizer: Tokenizer,
    snapshots: SnapshotKeeper | None,
    start: Start,
    spans: Spans | None,
    replica: Replica | None,
    specs: list[PodSpec],
) -> AsyncIterator[None]:
    async def begin() -> None:
        if snapshots is not None:
            for spec in await snapshots.restore():
                readiness.wait_for(spec)
            snapshots.start()
        if replica is not None:
            replica.start(specs)
        ingest.start()
        loads.start()
        readiness.begin()

    await start.run(begin(), aside=snapshots is not None)
    timer = asyncio.create_task(_tick(service, metrics, start, settings.sweep_interval_s), name="tick")
    try:
        yield
    finally:
        await start.stop()
        timer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await timer
        await loads.stop()
        await tokenizer.close()
        ingest.stop()
        if replica is not None:
            await replica.stop(settings.shutdown_grace_s)
        if snapshots is not None and start.is_over:
            await snapshots.stop(settings.snapshot_grace_s)
        if spans is not None:
            await asyncio.to_thread(spans.close)


async def _tick(service: IndexerService, metrics: Metrics, start: Start, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        if not start.is_over:
            continue
        try:
            service.tick()
        except Exception:  # the outermost loop of this task: it must outlive one bad slice, and say so
            logger.exception("a timer slice failed")
            metrics.observe_failed_tick()
