"""A pod's /metrics, under the names that vLLM gives them, so that what reads engines reads these pods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.simulator.engine import EngineStats
from app.simulator.pod import Pod

LABELS = ("engine", "model_name")
GAUGES = {
    "vllm:num_requests_running": ("Number of requests in model execution batches.", "running"),
    "vllm:num_requests_waiting": ("Number of requests waiting to be processed.", "waiting"),
    "vllm:kv_cache_usage_perc": ("KV-cache usage. 1 means 100 percent usage.", "cache_usage"),
}
COUNTERS = {
    "vllm:prefix_cache_queries": (
        "Prefix cache queries, in terms of number of queried tokens.",
        "queried_tokens",
    ),
    "vllm:prefix_cache_hits": ("Prefix cache hits, in terms of number of cached tokens.", "hit_tokens"),
    "vllm:external_prefix_cache_queries": (
        "External prefix cache queries, in tokens.",
        "offload_queried_tokens",
    ),
    "vllm:external_prefix_cache_hits": ("External prefix cache hits, in tokens.", "offload_hit_tokens"),
    "vllm:prompt_tokens": ("Number of prefill tokens processed.", "prompt_tokens"),
    "vllm:generation_tokens": ("Number of generation tokens processed.", "generated_tokens"),
    "vllm:num_preemptions": ("Cumulative number of preemptions from the engine.", "preemptions"),
}
SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)


class PodMetrics:
    """Counters and gauges are read from the engines at the scrape; latencies are observed, in simulated seconds."""

    def __init__(self, pod: Pod) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(pod))
        self.time_to_first_token = self._histogram("vllm:time_to_first_token_seconds", "Time to first token.")
        self.latency = self._histogram("vllm:e2e_request_latency_seconds", "Latency of a whole request.")

    def _histogram(self, name: str, documentation: str) -> Histogram:
        return Histogram(name, documentation, LABELS, buckets=SECONDS, registry=self._registry)

    def scrape(self) -> bytes:
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, pod: Pod) -> None:
        self._pod = pod

    def collect(self) -> Iterable[Metric]:
        model = self._pod.settings.model
        stats = [(str(rank.dp_rank), rank.engine.stats()) for rank in self._pod.ranks]
        for name, (documentation, field) in GAUGES.items():
            gauge = GaugeMetricFamily(name, documentation, labels=LABELS)
            for engine, values in stats:
                gauge.add_metric([engine, model], getattr(values, field))
            yield gauge
        for name, (documentation, field) in COUNTERS.items():
            counter = CounterMetricFamily(name, documentation, labels=LABELS)
            for engine, values in stats:
                counter.add_metric([engine, model], getattr(values, field))
            yield counter
        yield from self._others(model, stats)

    def _others(self, model: str, stats: Sequence[tuple[str, EngineStats]]) -> Iterable[Metric]:
        success = CounterMetricFamily(
            "vllm:request_success",
            "Count of successfully processed requests.",
            labels=(*LABELS, "finished_reason"),
        )
        for engine, values in stats:
            success.add_metric([engine, model, "length"], values.finished)
        yield success
        cache = self._pod.settings.engine.cache
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            labels=("engine", "block_size", "num_gpu_blocks", "enable_prefix_caching"),
        )
        for engine, _ in stats:
            info.add_metric([engine, str(cache.block_size), str(cache.capacity_pages), "True"], 1.0)
        yield info
