"""Every Prometheus name of the service; docs/operations.md says what each is for.

Two kinds, by what they cost. Distributions (requests, match depths, event lag) are observed as they happen:
one observation a request or a batch, never one a block. All that the index, the sources and the service
count already is read when somebody scrapes, by a collector over their own figures.

One registry for each application, none global: two applications in one process do not see each other's
figures. Labels are bounded: routes are templates, methods a fixed set, reasons a small fixed set, pods at
most `pods_max`; a pod's series end when the pod goes.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from app.pods import Pod

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
_REQUEST_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)
_DEPTH_BLOCKS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# A name here is without the prefix kvindexer_, and that of a counter without the suffix _total.
_INDEX_GAUGES = {
    "contexts": ("index_contexts", "Contexts: model, LoRA adapter and block size"),
    "prefixes": ("index_prefixes", "Index entries: one for each prefix of each context"),
    "holder_sets": ("index_holder_sets", "Distinct sets of holders"),
    "engine_keys": ("index_engine_keys", "Engine hashes that name a prefix"),
    "copies": ("index_copies", "Engine hashes with more than one copy"),
    "orphan_blocks": ("index_orphan_blocks", "Blocks that wait for a parent not seen yet"),
    "speculative_blocks": ("index_speculative_blocks", "Blocks that routers have announced"),
    "claims": ("index_claims", "Blocks with an owner, one for each owner, rank and tier"),
    "bytes": ("index_bytes", "Memory of the index's tables in bytes"),
}
_INDEX_COUNTERS = {
    "speculative_refused": ("index_speculative_refused", "Announced blocks refused: speculative_blocks_max"),
    "claims_refused": (
        "index_claims_refused",
        "Blocks stored without the owner that was named: owner_claims_max",
    ),
}
# The figure of the index -> the setting that made entries go.
_EVICTION_CAUSES = {
    "expired": "ttl_s",
    "evicted": "prefixes_per_context_max",
    "evicted_in_all": "prefixes_max",
    "contexts_evicted": "contexts_max",
}
_ORPHAN_CAUSES = {"orphans_dropped": "orphan_blocks_max", "orphans_expired": "ttl_s"}
_QUERY_COUNTERS = {
    "matches": ("match_queries", "Match queries answered"),
    "matches_hit": ("match_hits", "Match queries for which some pod holds a block"),
    "tokens_asked": ("match_asked_tokens", "Tokens of the prompts that were asked about"),
    "tokens_matched": ("match_matched_tokens", "Those of them that the best pod holds"),
}
_SOURCE_COUNTERS = {
    "gaps": ("source_gaps", "Gaps in the sequence numbers"),
    "replays": ("source_replays", "Replays begun"),
    "restarts": ("source_restarts", "Engine restarts seen"),
    "orphans": ("source_orphans", "Blocks that came before their parent"),
    "duplicates": ("source_duplicates", "Batches seen before and left out"),
    "rejected": ("source_rejected", "Events skipped"),
    "unknown_blocks": ("source_unknown_blocks", "Blocks named that the source does not hold"),
}
_STREAM_GAUGES = {
    "dumps_running": "Dumps that are being read",
    "live_subscribers": "Readers of the live feed",
}
_STREAM_COUNTERS = {
    "dumps_refused": "Dumps refused: dumps_max",
    "live_refused": "Readers of the live feed refused: live_subscribers_max",
    "live_dropped": "Live events that a slow reader lost: live_queue_events_max",
}
# Figures of the ZMQ ingest: the metric is kvindexer_zmq_ and the key.
_ZMQ_GAUGES = {
    "queued_batches": "Received batches that wait for the writer",
    "queued_bytes": "Their bytes",
    "held_bytes": "Bytes of live batches held back during replays",
    "replays_running": "Replays under way",
    "replays_waiting": "Replays that wait for their turn",
}
_ZMQ_COUNTERS = {
    "messages": "Messages received, live and replayed",
    "message_bytes": "Bytes of their payloads",
    "messages_malformed": "Messages that are not the frames of a batch",
    "open_failures": "Sockets that could not be opened; each is tried again",
    "handshake_failures": "Connections that ended before a ZMQ handshake did; each is tried again",
    "faults": "Rounds of the receiver that ended in a fault of ours",
    "duplicates": "Batches that came again and were dropped",
    "probes": "Questions whether the end of a stream was lost",
    "replay_timeouts": "Replays cut short because no reply came",
    "batches_applied": "Batches handed to the service",
    "batches_unreadable": "Batches whose payload is none",
    "batches_refused": "Batches that the service refused",
    "batches_unfollowed": "Batches whose pod was removed while they waited",
    "drain_slices": "Slices in which the queue was emptied",
    "held_overflows": "Times that the room for held back batches was full",
    "queue_full_pauses": "Times that reading stopped because the queue was full",
}

# Figures of a part of the application: the metric is kvindexer_, the part, _ and the key.
_PART_GAUGES = {
    "tokenizer": {
        "waiting": "Prompts that wait to be tokenised, or are",
        "cache_entries": "Prompts whose token ids are kept",
        "cache_bytes": "Bytes of those",
    },
    "loads": {"known": "Pods whose load was read lately"},
    "access": {"keys": "API keys that are known now"},
    "bodies": {"bytes": "Bytes of request bodies that have come and are not answered yet"},
    "snapshot": {
        "saved_at_seconds": "Unix time of the newest snapshot; of replicas over Redis, whichever wrote it",
        "saved_bytes": "Its bytes on disk",
        "restored_blocks": "Blocks that the snapshot at the start brought",
    },
    "hints": {
        "kept": "Hints of blocks that are kept",
        "waiting": "Those of them whose block waits for its parent",
        "bytes": "Bytes of their metadata",
    },
    "replication": {
        "lag_seconds": "Age of the newest group applied here, while the log has newer ones",
        "away_seconds": "Time since the log could be read last; 0 while it can be",
        "partitions_in_trouble": "Partitions of the log that are not read now",
        "outbox_entries": "Accepted entries that the log has not given back yet",
        "outbox_bytes": "Their bytes",
    },
    "leases": {
        "held": "Pods whose streams this replica follows",
        "replicas": "Replicas that are alive, this one included",
        "pods": "Pods with a stream, of which one replica each holds the lease",
        "taking": "Leases held that wait for the log before their pod is followed",
    },
    "fuzzy": {
        "contexts": "Contexts whose blocks fuzzy matches find",
        "blocks": "Blocks that they find, removed ones too until they are swept",
        "same_content": "Those of them known to be beyond the first of their tokens",
        "backlog": "Those of them that the next fuzzy match has to put in its tables first",
        "asleep": "Contexts of which no fuzzy match has been asked, or none while as many blocks came as they hold",
        "unswept": "Removed blocks that are not swept yet, at the most",
        "crowded": "Contents that only exact matches find: too many others are nearly the same",
        "bytes": "Memory of all this in bytes",
        "asked": "Fuzzy matches that are under way or wait for their turn",
    },
    "owners": {
        "known": "Owners that blocks were stored for",
    },
}
_PART_COUNTERS = {
    "tokenizer": {
        "cache_hits": "Prompts whose token ids were kept from before",
        "cache_misses": "Prompts that had to be tokenised",
        "cache_evictions": "Prompts that went: tokenizer_cache_bytes_max",
        "loads": "Tokenizers loaded",
        "unloads": "Tokenizers let go: tokenizers_max",
        "starts": "Processes started to tokenise",
        "failures": "Times that a tokenizer could not be had",
        "refused": "Prompts refused: tokenizer_queue_max",
    },
    "loads": {
        "polls": "Times that a pod was asked for its load",
        "failures": "Those of them without an answer that can be used",
    },
    "access": {
        "refused_without_key": "Requests refused: no key where one is needed",
        "refused_unknown_key": "Requests refused: a key that is not known",
        "refused_scope": "Requests refused: a key of scope read where write is needed",
        "refused_rate": "Requests refused: rate_requests_per_s",
        "reloads": "Times that the file of keys was taken over",
        "reload_failures": "Times that it could not be used; the keys from before stay",
    },
    "connections": {
        "head_timeouts": "Connections ended: head_timeout_s",
        "body_timeouts": "Connections ended: body_timeout_s",
        "send_timeouts": "Connections ended: send_timeout_s",
        "heads_too_long": "Connections ended: head_bytes_max",
    },
    "bodies": {"refused": "Requests refused: bodies_bytes_max"},
    "snapshot": {
        "saved": "Snapshots written",
        "failed": "Snapshots that could not be written",
        "refused": "Files that were damaged or foreign",
    },
    "replication": {
        "appended_groups": "Groups of entries appended to the log",
        "appended_entries": "Their entries",
        "append_failures": "Appends that failed; each is tried again",
        "lost_groups": "Groups that Redis had taken and lost before anybody read them; each is appended again",
        "outbox_refused": "Entries refused: redis_outbox_bytes_max",
        "read_groups": "Groups read from the log",
        "read_bytes": "Their bytes",
        "read_failures": "Reads of the log that failed; each is tried again",
        "reconnects": "Times that a partition was read again after that",
        "applied_groups": "Groups applied",
        "applied_entries": "Their entries",
        "repeated_groups": "Groups left out because they had come before",
        "early_groups": "Groups left out because Redis had lost the one before",
        "fenced_entries": "Entries left out because the lease of the pod had passed on",
        "refused_entries": "Entries that the picture of then did not allow",
        "faults": "Entries left out by a fault of ours",
        "snapshots_loaded": "Snapshots loaded from Redis in place of what was held",
        "logs_begun": "New logs begun with the picture of this replica, because Redis lost data",
        "logs_left": "Times that what was held was forgotten because a new log had begun with nothing",
        "trimmed_groups": "Groups that this replica trimmed from the log, behind a snapshot",
        "unleased_entries": "Entries of followed streams left out because the lease was gone",
        "hashed_blocks": "Blocks accepted here and logged as hashes",
        "raw_blocks": "Blocks accepted here and logged with their tokens",
    },
    "leases": {
        "taken": "Leases taken",
        "lost": "Leases lost without having been given up",
        "handed_over": "Leases handed to a replica that asked",
        "exchanges": "Exchanges with Redis",
        "exchanges_failed": "Those without an answer in time",
        "granted": "Times that a stream was followed because of a lease",
        "takings_failed": "Times that the log was away when a lease was to be used; each is tried again",
        "outlived": "Leases given back because the log had a newer one",
    },
    "route": {
        "choices_longest_prefix": "Choices by the longest prefix",
        "choices_prefix_and_load": "Choices by prefix and load",
        "choices_round_robin": "Choices in turn",
        "choices_least_loaded": "Choices by load",
        "reserved_blocks": "Blocks announced with a choice",
    },
    "hints": {
        "stored": "Hints that came with blocks",
        "refused": "Metadata that was not kept: no object, or hint_bytes_max",
        "evicted": "Hints that had to go for newer ones: hints_max",
        "cut": "Hints left out of rows: row_hints_max",
    },
    "fuzzy": {
        "queries": "Fuzzy matches answered",
        "asked_tokens": "Tokens of the prompts that were asked about",
        "reusable_tokens": "Those of them that are held somewhere, exactly or nearly",
        "candidates_dropped": "Stored blocks, at the least, left out of answers: fuzzy_candidates_max",
        "refused": "Fuzzy matches refused: fuzzy_queue_max",
    },
    "owners": {
        "refused": "Batches refused for a new owner: owners_max",
    },
}

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


class _Distribution:
    """A histogram of one thread: a tenth of the cost of prometheus_client's, whose every number has a lock."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last is past every bound
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, itertools.accumulate(self.counts), strict=True))


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


class Metrics:
    """The metrics of one application. All calls are made from the service's thread."""

    def __init__(self, figures: Figures) -> None:
        # A second series for each counter and histogram, which says only when it began: the uptime does.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._requests: dict[tuple[str, str, int], _Distribution] = {}  # method, route, status
        self._depth = _Distribution(_DEPTH_BLOCKS)
        self._lag = _Distribution(_LAG_SECONDS)
        self._ticks_failed = Counter(
            "kvindexer_ticks_failed", "Timer slices that ended in a fault of ours", registry=self._registry
        )
        self._registry.register(_FiguresCollector(figures))
        self._registry.register(_DistributionsCollector(self._requests, self._depth, self._lag))

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        key = (method if method in _METHODS else "other", route, status)
        series = self._requests.get(key)
        if series is None:
            series = self._requests[key] = _Distribution(_REQUEST_SECONDS)
        series.observe(seconds)

    def observe_match(self, depth_blocks: int) -> None:
        self._depth.observe(depth_blocks)

    def observe_lag(self, lag_s: float) -> None:
        """Clocks of two machines differ, so a lag can come out negative: it counts as none."""
        self._lag.observe(max(0.0, lag_s))

    def observe_failed_tick(self) -> None:
        self._ticks_failed.inc()

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


class _FiguresCollector(Collector):
    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        stats = self._figures.stats()
        pods = list(self._figures.pods())
        index, queries = stats["index"], stats["queries"]
        for key, (name, documentation) in _INDEX_GAUGES.items():
            yield _gauge(name, documentation, value=index[key])
        for key, (name, documentation) in _INDEX_COUNTERS.items():
            yield _counter(name, documentation, value=index[key])
        for key, (name, documentation) in _QUERY_COUNTERS.items():
            yield _counter(name, documentation, value=queries[key])
        yield _by_label(
            _counter("index_evictions", "Entries (for contexts_max: contexts) that went", "cause"),
            {cause: index[key] for key, cause in _EVICTION_CAUSES.items()},
        )
        yield _by_label(
            _counter("index_orphans_dropped", "Waiting blocks that were given up", "cause"),
            {cause: index[key] for key, cause in _ORPHAN_CAUSES.items()},
        )
        yield _by_label(_counter("events_rejected", "Events skipped", "reason"), stats["rejected"])
        for key, documentation in _STREAM_GAUGES.items():
            yield _gauge(key, documentation, value=stats["streams"][key])
        for key, documentation in _STREAM_COUNTERS.items():
            yield _counter(key, documentation, value=stats["streams"][key])
        gauges, counters = self._figures.gauges(), self._figures.counters()
        for key, documentation in _ZMQ_GAUGES.items():
            yield _gauge(f"zmq_{key}", documentation, value=gauges.get(key, 0))
        for key, documentation in _ZMQ_COUNTERS.items():
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
        for key, documentation in _PART_GAUGES.get(part, {}).items():
            yield _gauge(f"{part}_{key}", documentation, value=gauges.get(key, 0))
        for key, documentation in _PART_COUNTERS.get(part, {}).items():
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
        for key, (name, documentation) in _SOURCE_COUNTERS.items()
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


class _DistributionsCollector(Collector):
    def __init__(
        self, requests: Mapping[tuple[str, str, int], _Distribution], depth: _Distribution, lag: _Distribution
    ) -> None:
        self._requests = requests
        self._depth = depth
        self._lag = lag

    def collect(self) -> Iterator[Metric]:
        requests = HistogramMetricFamily(
            "kvindexer_http_request_seconds",
            "Requests and their latency, by method, route template and status",
            labels=["method", "route", "status"],
        )
        for (method, route, status), series in self._requests.items():
            requests.add_metric([method, route, str(status)], series.buckets(), series.total)
        yield requests
        yield HistogramMetricFamily(
            "kvindexer_match_depth_blocks",
            "Deepest confirmed match of each query in blocks; bucket 0 counts the misses",
            self._depth.buckets(),
            self._depth.total,
        )
        yield HistogramMetricFamily(
            "kvindexer_event_lag_seconds",
            "Time from an engine's stamp on a batch to its application",
            self._lag.buckets(),
            self._lag.total,
        )


def _gauge(name: str, documentation: str, *labels: str, value: float | None = None) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvindexer_{name}", documentation, value, labels or None)


def _counter(name: str, documentation: str, *labels: str, value: float | None = None) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvindexer_{name}", documentation, value, labels or None)


def _by_label(family: Metric, values: Mapping[str, float]) -> Metric:
    for label, value in values.items():
        family.add_metric([label], value)  # type: ignore[attr-defined]
    return family
