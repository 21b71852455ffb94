"""What others count, read when somebody scrapes."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.metrics.names import (
    EVICTION_CAUSES,
    INDEX_COUNTERS,
    INDEX_GAUGES,
    ORPHAN_CAUSES,
    PART_COUNTERS,
    PART_GAUGES,
    QUERY_COUNTERS,
    SOURCE_COUNTERS,
    STREAM_COUNTERS,
    STREAM_GAUGES,
    ZMQ_COUNTERS,
    ZMQ_GAUGES,
)
from app.pods import Pod

Count = Callable[[], Mapping[str, float]]


class Place(Protocol):
    """A place of discovery: app/discovery says what the words mean."""

    @property
    def place(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def seen_age_s(self) -> float | None: ...
    @property
    def pods(self) -> Mapping[str, int]: ...
    @property
    def looks(self) -> Mapping[str, int]: ...
    @property
    def changes(self) -> Mapping[str, int]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """Where a scrape reads what others count: called on the service's thread.

    `stats` is IndexerService.stats; `gauges` and `counters` are those of the ZMQ ingest, by name; `parts` has both
    of others by the name of the part; `places` and `questions` are those of the discovery.
    """

    stats: Callable[[], Mapping[str, Any]]
    pods: Callable[[], Iterable[Pod]]
    gauges: Callable[[], Mapping[str, int]]
    counters: Callable[[], Mapping[str, int]]
    parts: Callable[[], Mapping[str, tuple[Count, Count]]] = dict
    places: Callable[[], Sequence[Place]] = tuple
    questions: Count = dict
    clock: Callable[[], float] = time.monotonic  # the service's


class FiguresCollector(Collector):
    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        stats = self._figures.stats()
        pods = list(self._figures.pods())
        index, queries = stats["index"], stats["queries"]
        for key, (name, documentation) in INDEX_GAUGES.items():
            yield _gauge(name, documentation, value=index[key])
        for key, (name, documentation) in INDEX_COUNTERS.items():
            yield _counter(name, documentation, value=index[key])
        for key, (name, documentation) in QUERY_COUNTERS.items():
            yield _counter(name, documentation, value=queries[key])
        yield _by_label(
            _counter("index_evictions", "Entries (for contexts_max: contexts) that went", "cause"),
            {cause: index[key] for key, cause in EVICTION_CAUSES.items()},
        )
        yield _by_label(
            _counter("index_orphans_dropped", "Waiting blocks that were given up", "cause"),
            {cause: index[key] for key, cause in ORPHAN_CAUSES.items()},
        )
        yield _by_label(_counter("events_rejected", "Events skipped", "reason"), stats["rejected"])
        for key, documentation in STREAM_GAUGES.items():
            yield _gauge(key, documentation, value=stats["streams"][key])
        for key, documentation in STREAM_COUNTERS.items():
            yield _counter(key, documentation, value=stats["streams"][key])
        gauges, counters = self._figures.gauges(), self._figures.counters()
        for key, documentation in ZMQ_GAUGES.items():
            yield _gauge(f"zmq_{key}", documentation, value=gauges.get(key, 0))
        for key, documentation in ZMQ_COUNTERS.items():
            yield _counter(f"zmq_{key}", documentation, value=counters.get(key, 0))
        yield from _part_families(self._figures.parts())
        yield from _place_families(self._figures.places())
        yield _by_label(
            _counter("discovery_questions", "Times that an engine was asked what it is", "result"),
            self._figures.questions(),
        )
        yield _gauge("pods", "Registered pods", value=len(pods))
        yield _gauge("uptime_seconds", "Time since the start", value=stats["uptime_s"])
        yield from _pod_families(pods)
        yield from _source_families(pods, self._figures.clock())


def _part_families(parts: Mapping[str, tuple[Count, Count]]) -> Iterator[Metric]:
    for part, (read_gauges, read_counters) in parts.items():
        gauges, counters = read_gauges(), read_counters()
        for key, documentation in PART_GAUGES.get(part, {}).items():
            yield _gauge(f"{part}_{key}", documentation, value=gauges.get(key, 0))
        for key, documentation in PART_COUNTERS.get(part, {}).items():
            yield _counter(f"{part}_{key}", documentation, value=counters.get(key, 0))


def _place_families(places: Sequence[Place]) -> Iterator[Metric]:
    states = _gauge("discovery_state", "1 for the present state of each place", "place", "state")
    ages = _gauge("discovery_seen_age_seconds", "Time since the last picture of a place", "place")
    pods = _gauge("discovery_pods", "Pods of a place", "place", "state")
    looks = _counter("discovery_looks", "Pictures and failures of a place", "place", "result")
    changes = _counter("discovery_changes", "Changes that a place told", "place", "change")
    for place in places:
        states.add_metric([place.place, str(place.state)], 1)
        if place.seen_age_s is not None:
            ages.add_metric([place.place], place.seen_age_s)
        for family, values in ((pods, place.pods), (looks, place.looks), (changes, place.changes)):
            for label, value in values.items():
                family.add_metric([place.place, label], value)
    yield from (states, ages, pods, looks, changes)


def _pod_families(pods: Iterable[Pod]) -> Iterator[Metric]:
    events = _counter("events", "Events applied", "pod", "type")
    blocks = _counter("event_blocks", "Blocks that events stored and removed", "pod", "type")
    for pod in pods:
        name, sources = pod.spec.name, pod.sources.values()
        tally = sum((source.events for source in sources), Tally[str]())
        tally["ignored"] = sum(source.ignored for source in sources)
        for kind, count in tally.items():
            events.add_metric([name, kind], count)
        blocks.add_metric([name, "stored"], sum(source.stored_blocks for source in sources))
        blocks.add_metric([name, "removed"], sum(source.removed_blocks for source in sources))
    yield events
    yield blocks


def _source_families(pods: Iterable[Pod], now_s: float) -> Iterator[Metric]:
    states = _gauge("source_state", "1 for the present state of each source", "pod", "dp_rank", "state")
    ages = _gauge(
        "source_last_event_age_seconds", "Time since the last batch of each source", "pod", "dp_rank"
    )
    counters = {
        key: _counter(name, documentation, "pod", "dp_rank")
        for key, (name, documentation) in SOURCE_COUNTERS.items()
    }
    for pod in pods:
        for dp_rank, source in pod.sources.items():
            labels = [pod.spec.name, str(dp_rank)]
            states.add_metric([*labels, source.state.value], 1)
            if source.last_event_at_s is not None:
                ages.add_metric(labels, now_s - source.last_event_at_s)
            for key, family in counters.items():
                family.add_metric(labels, getattr(source, key))
    yield states
    yield ages
    yield from counters.values()


def _gauge(name: str, documentation: str, *labels: str, value: float | None = None) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvindexer_{name}", documentation, value, labels or None)


def _counter(name: str, documentation: str, *labels: str, value: float | None = None) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvindexer_{name}", documentation, value, labels or None)


def _by_label(family: Metric, values: Mapping[str, float]) -> Metric:
    for label, value in values.items():
        family.add_metric([label], value)  # type: ignore[attr-defined]
    return family
