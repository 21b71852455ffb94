"""What the process consists of, put together from the settings; nothing of it runs yet.

With Redis some parts differ: changes go through the log, a pod is followed by the replica that holds its lease, and
snapshots lie beside the log. Configured pods are registered here, before the first request is served, so a router never
sees an indexer that does not know its own configuration. How the parts start and end is in
app/lifecycle.py, what stands in front of them in app/main.py.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from app.auth.key_ring import key_ring
from app.config import Settings, variable
from app.discovery.discovery import Discovery, places
from app.discovery.pods_file import place_of
from app.errors import IndexerError, InvalidInput, InvalidSettings
from app.events import EventBatch
from app.fuzzy.fuzzy_index import FuzzyIndex
from app.index.prefix_index import PrefixIndex
from app.ingest.feed import QueueLimits
from app.ingest.registry import parse_pod, read_pods_file
from app.ingest.sequence import SequenceLimits
from app.ingest.sockets import SocketLimits
from app.ingest.vllm import decode_batch
from app.ingest.zmq import ZmqIngest, ZmqSettings
from app.lifecycle import Parts
from app.metrics.figures import Count, Figures
from app.metrics.metrics import Metrics
from app.observability.tracing import open_spans
from app.pods import PodSpec
from app.readiness import Readiness
from app.routing.loads import Loads
from app.routing.router import Router
from app.service import IndexerService, index_limits
from app.service.fuzzy_queries import fuzzy_index
from app.service.writers import DirectWriter, Writer
from app.serving.connections import ConnectionLimits
from app.snapshots.file import FileStore
from app.snapshots.keeper import SnapshotKeeper
from app.start import Start
from app.tokenizer.front import Tokenizer

if TYPE_CHECKING:
    from app.replication.replica import Replica


# Without the setting that they refine they have no effect, and whoever set them believes that they have one.
_BESIDE = {
    "redis_url": ("redis_cluster", "redis_namespace", "redis_partitions"),
    "discovery_dns": ("discovery_dns_server",),
    "discovery_kubernetes": ("discovery_kubernetes_namespace",),
}


def assembled(settings: Settings, clock: Callable[[], float]) -> Parts:
    """Raises InvalidSettings. Some parts refer to `parts` before it exists: they use it only after the start."""
    _check_beside(settings)
    configured, file_specs = _configured_pods(settings)
    specs = [*configured, *file_specs]
    contents = fuzzy_index(settings)
    index = PrefixIndex(index_limits(settings), contents)
    service = IndexerService(settings, index, clock=clock, contents=contents)
    snapshots = _snapshots(settings, service, index, specs)
    replica = None if settings.redis_url is None else _replica(settings, service, index, contents)
    writer: Writer = DirectWriter(service) if replica is None else replica.writer
    loads = Loads(settings, pods=lambda: [pod.spec for pod in service.pods.values()], clock=clock)
    keys = key_ring(settings, on_revoked=service.live.disconnect)
    metrics = Metrics(_figures(lambda: parts, clock))
    ingest = _ingest(settings, service, replica, metrics)
    _register(service, replica, specs)
    readiness = Readiness(
        service,
        specs,
        clock=clock,
        grace_s=settings.ready_grace_s,
        unfinished=lambda: parts.discovery.unfinished(),
    )
    parts = Parts(
        settings=settings,
        service=service,
        specs=specs,
        start=Start(),
        keys=keys,
        connections=ConnectionLimits(settings),
        snapshots=snapshots,
        replica=replica,
        writer=writer,
        ingest=ingest,
        loads=loads,
        router=Router(settings, service, clock=clock, polled=loads.load),
        discovery=Discovery(
            settings,
            service,
            writer,
            places(settings, file_specs=tuple(file_specs)),
            reserved=frozenset(spec.name for spec in configured),
            registered=readiness.wait_for,
            clock=clock,
        ),
        readiness=readiness,
        tokenizer=Tokenizer(
            settings,
            serves=lambda model: any(pod.spec.model == model for pod in service.pods.values()),
            clock=clock,
        ),
        metrics=metrics,
        spans=open_spans(settings),
    )
    return parts


def _check_beside(settings: Settings) -> None:
    for needed, names in _BESIDE.items():
        for name in names if not getattr(settings, needed) else ():
            if getattr(settings, name) != Settings.model_fields[name].default:
                raise InvalidSettings(f"{variable(name)}: there is no {variable(needed)} beside it")


def _figures(parts: Callable[[], Parts], clock: Callable[[], float]) -> Figures:
    return Figures(
        stats=lambda: parts().service.stats(),
        pods=lambda: parts().service.pods.values(),
        gauges=lambda: parts().ingest.gauges(),
        counters=lambda: parts().ingest.counters(),
        parts=lambda: _counted(parts()),
        places=lambda: parts().discovery.figures(),
        questions=lambda: parts().discovery.questions(),
        clock=clock,
    )


def _counted(parts: Parts) -> dict[str, tuple[Count, Count]]:
    """Gauges and counters of each part that has some, by the name that its metrics begin with."""
    service, replica = parts.service, parts.replica
    keeper = replica.keeper if replica else parts.snapshots
    return {
        "tokenizer": (parts.tokenizer.gauges, parts.tokenizer.counters),
        "loads": (parts.loads.gauges, parts.loads.counters),
        "route": (dict, parts.router.counters),
        "replication": (replica.gauges, replica.counters) if replica else (dict, dict),
        "leases": (replica.following.gauges, replica.following.counters) if replica else (dict, dict),
        "snapshot": (keeper.gauges, keeper.counters) if keeper else (dict, dict),
        "hints": (service.hints.gauges, service.hints.counters),
        "fuzzy": (service.fuzzy.gauges, service.fuzzy.counters),
        "owners": (service.owners.gauges, service.owners.counters),
        "access": (parts.keys.gauges, parts.keys.counters),
        "connections": (parts.connections.gauges, parts.connections.counters),
        "bodies": (parts.connections.body_room.gauges, parts.connections.body_room.counters),
    }


def _snapshots(
    settings: Settings, service: IndexerService, index: PrefixIndex, specs: list[PodSpec]
) -> SnapshotKeeper | None:
    path = settings.snapshot_path
    if path is None:
        return None
    if settings.redis_url is not None:
        raise InvalidSettings(
            f"{variable('snapshot_path')} and {variable('redis_url')} exclude each other: a file does not know its "
            "place in the log"
        )
    said = f"{variable('snapshot_path')}={str(path)!r}"
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidSettings(f"{said}: must be a file in a folder that is there")
    try:  # now, and not when the first snapshot is due
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise InvalidSettings(f"{said}: nothing can be written in its folder: {error.strerror}") from error
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
    except InvalidInput as error:
        raise InvalidSettings(f"{variable('pods')}: {error}") from error
    try:
        file_specs = _pods_of_file(settings.pods_file)
    except InvalidInput as error:
        raise InvalidSettings(f"{variable('pods_file')}: {error}") from error
    counts = Counter(spec.name for spec in [*specs, *file_specs])
    for name, count in counts.items():
        if count > 1:
            raise InvalidSettings(f"pod {name!r} is configured {count} times")
    return specs, file_specs


def _pods_of_file(path: Path | None) -> list[PodSpec]:
    if path is None:
        return []
    return [dataclasses.replace(spec, discovered_by=place_of(path)) for spec in read_pods_file(path)]


def _register(service: IndexerService, replica: Replica | None, specs: list[PodSpec]) -> None:
    """The configured pods; with a log they are checked now, and registered through it when it is read."""
    for spec in specs:
        try:
            if replica is None:
                service.register(spec)
            else:
                service.check_spec(spec)
        except IndexerError as error:
            raise InvalidSettings(f"pod {spec.name!r}: {error}") from error


def _ingest(
    settings: Settings, service: IndexerService, replica: Replica | None, metrics: Metrics
) -> ZmqIngest:
    """Follows every pod or, with a log, those whose lease this replica has."""
    decode = functools.partial(_decode, metrics)
    if replica is None:
        ingest = ZmqIngest(service, _zmq_settings(settings), decode=decode)
        service.listeners.append(ingest)
        return ingest
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
    return ingest


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
