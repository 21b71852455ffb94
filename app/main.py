"""The only place where things are wired together: settings in, an ASGI application out.

The event loop's thread is the one writer. The ZMQ ingest receives on a thread of its own and hands whole
batches to the loop; a timer gives the service its slices of expiry. Start: pods are registered before the first request
is served, so a router never sees an indexer that does not know its own configuration; while a snapshot is read, only
probes are answered. End: requests are finished, streams left, then the last snapshot is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
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
from app.api.access import Access
from app.api.observation import RequestObservation
from app.api.short_way import ShortWay
from app.api.starting import Starting
from app.api.wiring import Wiring, attach
from app.config import Settings
from app.connections import ConnectionLimits
from app.discovery.discovery import Discovery, places
from app.discovery.pods_file import place_of
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
from app.key_ring import KeyRing, key_ring
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


def create_app(
    settings: Settings, *, clock: Callable[[], float] = time.monotonic, short_way: bool = True
) -> Application:
    """Raises InvalidSettings for configured pods and keys that cannot be.

    Without `short_way` every request takes the framework's: the answers are the same, as the tests show.
    """
    configured, file_specs = _configured_pods(settings)
    specs = [*configured, *file_specs]
    contents = fuzzy_index(settings)
    index = PrefixIndex(index_limits(settings), contents)
    service = IndexerService(settings, index, clock=clock, contents=contents)
    snapshots = _snapshots(settings, service, index, specs)
    replica = None if settings.redis_url is None else _replica(settings, service, index, contents)
    writer: Writer = DirectWriter(service) if replica is None else replica.writer
    loads = Loads(settings, pods=lambda: [pod.spec for pod in service.pods.values()], clock=clock)
    router = Router(settings, service, clock=clock, polled=loads.load)
    tokenizer = Tokenizer(
        settings,
        serves=lambda model: any(pod.spec.model == model for pod in service.pods.values()),
        clock=clock,
    )
    keys = key_ring(settings, on_revoked=service.live.disconnect)
    connections = ConnectionLimits(settings)
    keeper = replica.keeper if replica else snapshots
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
                "leases": (replica.following.gauges, replica.following.counters) if replica else (dict, dict),
                "snapshot": (keeper.gauges, keeper.counters) if keeper else (dict, dict),
                "hints": (service.hints.gauges, service.hints.counters),
                "fuzzy": (service.fuzzy.gauges, service.fuzzy.counters),
                "owners": (service.owners.gauges, service.owners.counters),
                "access": (keys.gauges, keys.counters),
                "connections": (dict, connections.counters),
            },
            places=lambda: discovery.figures(),
            questions=lambda: discovery.questions(),
            clock=clock,
        )
    )
    decode = functools.partial(_decode, metrics)
    if replica is None:
        ingest = ZmqIngest(service, _zmq_settings(settings), decode=decode)
        service.listeners.append(ingest)
    else:
        ingest = ZmqIngest(
            replica.feed(),
            _zmq_settings(settings),
            decode=decode,
            on_grant=True,
            is_blocked=replica.is_blocked,
        )
        replica.on_room(ingest.unblocked)
        replica.following.attach(ingest)
        service.listeners.append(replica.following)
    for spec in specs:
        try:
            if replica is None:
                service.register(spec)
            else:
                service.check_spec(spec)
        except IndexerError as error:
            raise InvalidSettings(f"pod {spec.name!r}: {error}") from error
    spans = open_spans(settings)
    readiness = Readiness(
        service,
        specs,
        clock=clock,
        grace_s=settings.ready_grace_s,
        unfinished=lambda: discovery.unfinished(),
    )
    discovery = Discovery(
        settings,
        service,
        writer,
        places(settings, file_specs=tuple(file_specs)),
        reserved=frozenset(spec.name for spec in configured),
        registered=readiness.wait_for,
        clock=clock,
    )
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
            discovery,
            start,
            spans,
            replica,
            specs,
            keys,
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
        connections,
        replica.stats if replica else None,
        discovery.stats,
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
    # From the inside out. What must hold for every request (keys and rates, where there are any; metrics) stands
    # outside of the short way, so that no request can go around it.
    front: ASGIApp = Starting(ShortWay(app.framework, wiring=wiring) if short_way else app.framework, start)
    if keys.is_needed or settings.rate_requests_per_s:
        front = Access(front, keys=keys, clock=clock, page=functools.partial(pages.page, 401))
    app.front = RequestObservation(
        front, metrics=metrics, access_log_every=settings.access_log_every, spans=spans
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


def _configured_pods(settings: Settings) -> tuple[list[PodSpec], list[PodSpec]]:
    """Those of the setting, and those of the file."""
    try:
        specs = [parse_pod(text) for text in settings.pods]
        file_specs = _pods_of_file(settings.pods_file)
    except InvalidInput as error:
        raise InvalidSettings(str(error)) from error
    counts = Counter(spec.name for spec in [*specs, *file_specs])
    for name, count in counts.items():
        if count > 1:
            raise InvalidSettings(f"pod {name!r} is configured {count} times")
    return specs, file_specs


def _pods_of_file(path: Path | None) -> list[PodSpec]:
    if path is None:
        return []
    return [dataclasses.replace(spec, discovered_by=place_of(path)) for spec in read_pods_file(path)]


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


def _replica(
    settings: Settings, service: IndexerService, index: PrefixIndex, contents: FuzzyIndex | None
) -> Replica:
    # Redis's client takes a quarter of a second to import: only who has a Redis pays for it.
    from app.replication.replica import Replica

    return Replica(settings, service, index, contents)


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
    discovery: Discovery,
    start: Start,
    spans: Spans | None,
    replica: Replica | None,
    specs: list[PodSpec],
    keys: KeyRing,
) -> AsyncIterator[None]:
    keys.start()

    async def begin() -> None:
        if snapshots is not None:
            for spec in await snapshots.restore():
                readiness.wait_for(spec)
            snapshots.start()
        if replica is not None:
            replica.start(specs)
        ingest.start()
        loads.start()
        discovery.start()
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
        await discovery.stop()
        await keys.stop()
        await loads.stop()
        await tokenizer.close()
        if replica is not None:
            await replica.following.stop()
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
