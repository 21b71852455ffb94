"""Every Prometheus name of the service; docs/operations.md says what each is for.

Two kinds, by what they cost. What has no other record (requests, match depths, events by type, lag) is
counted as it happens: an addition or two for a request or a batch, never for a block. What the index and
the sources count already is read when somebody scrapes, by a collector over the service's own figures.

One registry for each application, none global: two applications in one process do not see each other's
figures. Labels are bounded: routes are templates, methods a fixed set, reasons a small fixed set, pods at
most `pods_max`, and a pod's series go when the pod goes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from app.events import EventBatch
from app.pods import Pod

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
_REQUEST_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)
_DEPTH_BLOCKS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# Figure of the index -> (metric, what it is).
_INDEX_GAUGES = {
    "contexts": ("kvindexer_index_contexts", "Contexts (model, LoRA adapter, block size)"),
    "prefixes": ("kvindexer_index_prefixes", "Index entries: one for each prefix of each context"),
    "holder_sets": ("kvindexer_index_holder_sets", "Distinct sets of holders"),
    "engine_keys": ("kvindexer_index_engine_keys", "Engine hashes that name a prefix"),
    "copies": ("kvindexer_index_copies", "Names with more than one copy"),
    "orphan_blocks": ("kvindexer_index_orphan_blocks", "Blocks that wait for a parent not seen yet"),
    "speculative_blocks": ("kvindexer_index_speculative_blocks", "Blocks announced by a router"),
    "bytes": ("kvindexer_index_bytes", "Memory of the index's tables in bytes"),
}
_INDEX_EVICTIONS = {
    "expired": "ttl_s",
    "evicted": "prefixes_per_context_max",
}
_INDEX_COUNTERS = {
    "contexts_evicted": ("kvindexer_index_contexts_evicted", "Contexts dropped because of contexts_max"),
    "speculative_refused": (
        "kvindexer_index_speculative_refused",
        "Announced blocks refused because of speculative_blocks_max",
    ),
}
_ORPHAN_DROPS = {"orphans_dropped": "orphan_blocks_max", "orphans_expired": "ttl_s"}
_SOURCE_COUNTERS = {
    "gaps": "Sequence gaps seen",
    "replays": "Replays begun",
    "restarts": "Engine restarts seen",
    "orphans": "Blocks that came before their parent",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """Where a scrape reads what others count: called once a scrape, on the service's thread."""

    index: Callable[[], Mapping[str, int]]
    pods: Callable[[], Iterable[Pod]]
    queues: Callable[[], Mapping[str, int]]


class Metrics:
    """The metrics of one application. All calls are made from the service's thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = Histogram(
            "kvindexer_http_request_seconds",
            "Requests and their latency, by method, route template and status",
            ["method", "route", "status"],
            buckets=_REQUEST_SECONDS,
            registry=self.registry,
        )
        self._depth = Histogram(
            "kvindexer_match_depth_blocks",
            "Deepest confirmed match of each query in blocks; bucket 0 counts the misses",
            buckets=_DEPTH_BLOCKS,
            registry=self.registry,
        )
        self._asked = self._counter(
            "kvindexer_match_asked_tokens", "Tokens of the prompts that were asked about"
        )
        self._matched = self._counter(
            "kvindexer_match_matched_tokens", "Those of them that the best pod holds"
        )
        self._events = self._counter("kvindexer_events", "Events applied", "pod", "type")
        self._blocks = self._counter("kvindexer_event_blocks", "Blocks stored and removed", "pod", "type")
        self._rejected = self._counter("kvindexer_events_rejected", "Events skipped", "pod", "reason")
        self._lag = Histogram(
            "kvindexer_event_lag_seconds",
            "Time from an engine's stamp on a batch to its application",
            buckets=_LAG_SECONDS,
            registry=self.registry,
        )
        self._ticks_failed = self._counter(
            "kvindexer_ticks_failed", "Timer slices that ended in a fault of ours"
        )
        self._request_series: dict[tuple[str, str, int], Histogram] = {}
        self._pod_series: dict[tuple[str, str], Counter] = {}
        self._rejected_series: set[tuple[str, str]] = set()

    def watch(self, figures: Figures) -> None:
        """Adds what is read at the scrape. Once an application."""
        self.registry.register(_FiguresCollector(figures))

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        key = (method if method in _METHODS else "other", route, status)
        series = self._request_series.get(key)
        if series is None:
            series = self._request_series[key] = self._requests.labels(*key)
        series.observe(seconds)

    def observe_match(self, *, asked_tokens: int, matched_tokens: int, matched_blocks: int) -> None:
        self._asked.inc(asked_tokens)
        self._matched.inc(matched_tokens)
        self._depth.observe(matched_blocks)

    def observe_batch(
        self, pod: str, batch: EventBatch, *, stored_blocks: int, removed_blocks: int, now_unix_s: float
    ) -> None:
        """A batch that was applied; events of `batch.rejected` are counted by reason."""
        for event in batch.events:
            self._pod_counter(pod, type(event).__name__).inc()
        if batch.ignored:
            self._pod_counter(pod, "ignored").inc(batch.ignored)
        if stored_blocks:
            self._pod_counter(pod, "stored").inc(stored_blocks)
        if removed_blocks:
            self._pod_counter(pod, "removed").inc(removed_blocks)
        for fault in batch.rejected:
            self.observe_rejected(pod, fault.reason)
        if batch.ts is not None:
            self._lag.observe(max(0.0, now_unix_s - batch.ts))

    def observe_rejected(self, pod: str, reason: str) -> None:
        self._rejected_series.add((pod, reason))
        self._rejected.labels(pod, reason).inc()

    def observe_failed_tick(self) -> None:
        self._ticks_failed.inc()

    def forget_pod(self, pod: str) -> None:
        """Ends the series of a pod that is gone."""
        for key in [key for key in self._pod_series if key[0] == pod]:
            family = self._blocks if key[1] in ("stored", "removed") else self._events
            family.remove(*key)
            del self._pod_series[key]
        for key in [key for key in self._rejected_series if key[0] == pod]:
            self._rejected.remove(*key)
            self._rejected_series.discard(key)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(name, documentation, labels, registry=self.registry)

    def _pod_counter(self, pod: str, kind: str) -> Counter:
        """Looking a series up in our own dict costs a third of `labels()`, which locks and checks."""
        series = self._pod_series.get((pod, kind))
        if series is None:
            family = self._blocks if kind in ("stored", "removed") else self._events
            series = self._pod_series[pod, kind] = family.labels(pod, kind)
        return series


class _FiguresCollector(Collector):
    """Reads at the scrape what the index, the sources and the queues count already."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def describe(self) -> Iterator[Metric]:
        """The families without samples: registration must not read a service that is not there yet."""
        for name, documentation in _INDEX_GAUGES.values():
            yield GaugeMetricFamily(name, documentation)
        for name, documentation in _INDEX_COUNTERS.values():
            yield CounterMetricFamily(name, documentation)
        yield _evictions()
        yield _orphan_drops()
        yield GaugeMetricFamily("kvindexer_pods", "Registered pods")
        yield from _source_families().values()
        yield _state_family()
        yield _queue_family()

    def collect(self) -> Iterator[Metric]:
        index = self._figures.index()
        for key, (name, documentation) in _INDEX_GAUGES.items():
            yield GaugeMetricFamily(name, documentation, index[key])
        for key, (name, documentation) in _INDEX_COUNTERS.items():
            yield CounterMetricFamily(name, documentation, index[key])
        yield _filled(_evictions(), _INDEX_EVICTIONS, index)
        yield _filled(_orphan_drops(), _ORPHAN_DROPS, index)
        yield from self._sources()
        queues = _queue_family()
        for queue, depth in self._figures.queues().items():
            queues.add_metric([queue], depth)
        yield queues

    def _sources(self) -> Iterator[Metric]:
        pods = list(self._figures.pods())
        yield GaugeMetricFamily("kvindexer_pods", "Registered pods", len(pods))
        counters, states = _source_families(), _state_family()
        for pod in pods:
            for rank, source in pod.sources.items():
                labels = [pod.spec.name, str(rank)]
                for key, family in counters.items():
                    family.add_metric(labels, getattr(source, key))
                states.add_metric([*labels, source.state.value], 1)
        yield from counters.values()
        yield states


def _evictions() -> CounterMetricFamily:
    return CounterMetricFamily(
        "kvindexer_index_evictions",
        "Index entries that went, by the setting that made them go",
        labels=["cause"],
    )


def _orphan_drops() -> CounterMetricFamily:
    return CounterMetricFamily(
        "kvindexer_index_orphans_dropped",
        "Waiting blocks that were given up, by the setting that made them go",
        labels=["cause"],
    )


def _filled(
    family: CounterMetricFamily, causes: Mapping[str, str], index: Mapping[str, int]
) -> CounterMetricFamily:
    for key, cause in causes.items():
        family.add_metric([cause], index[key])
    return family


def _source_families() -> dict[str, CounterMetricFamily]:
    return {
        key: CounterMetricFamily(f"kvindexer_source_{key}", documentation, labels=["pod", "dp_rank"])
        for key, documentation in _SOURCE_COUNTERS.items()
    }


def _state_family() -> GaugeMetricFamily:
    return GaugeMetricFamily(
        "kvindexer_source_state", "1 for the present state of each source", labels=["pod", "dp_rank", "state"]
    )


def _queue_family() -> GaugeMetricFamily:
    return GaugeMetricFamily("kvindexer_queue_batches", "Batches that wait in a queue", labels=["queue"])
