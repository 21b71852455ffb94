"""The collectors by themselves: what the HTTP tests cannot see."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from app.config import load_settings
from app.index.prefix_index import PrefixIndex
from app.ingest.zmq import ZmqIngest
from app.metrics.figures import Figures
from app.metrics.metrics import Metrics
from app.service import IndexerService, index_limits


def make_metrics() -> tuple[Metrics, IndexerService, ZmqIngest]:
    settings = load_settings()
    service = IndexerService(settings, PrefixIndex(index_limits(settings)), clock=lambda: 1.0)
    ingest = ZmqIngest(service)
    figures = Figures(service.stats, lambda: service.pods.values(), ingest.gauges, ingest.counters)
    return Metrics(figures), service, ingest


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_every_figure_of_the_ingest_has_a_metric() -> None:
    metrics, _, ingest = make_metrics()

    async def started() -> tuple[set[str], set[str]]:
        ingest.start()
        try:
            return set(ingest.gauges()), set(ingest.counters())
        finally:
            ingest.stop()

    gauges, counters = asyncio.run(started())
    assert gauges
    assert counters
    names = {name for name, _ in samples(metrics)}
    assert {f"kvindexer_zmq_{key}" for key in gauges} <= names
    assert {f"kvindexer_zmq_{key}_total" for key in counters} <= names


def test_every_figure_of_the_index_has_a_metric() -> None:
    metrics, service, _ = make_metrics()
    numbers = {key: value for key, value in service.stats()["index"].items() if isinstance(value, int)}
    text = metrics.exposition().decode()
    elsewhere = {
        "expired": 'kvindexer_index_evictions_total{cause="ttl_s"}',
        "evicted": 'kvindexer_index_evictions_total{cause="prefixes_per_context_max"}',
        "evicted_in_all": 'kvindexer_index_evictions_total{cause="prefixes_max"}',
        "contexts_evicted": 'kvindexer_index_evictions_total{cause="contexts_max"}',
        "orphans_dropped": 'kvindexer_index_orphans_dropped_total{cause="orphan_blocks_max"}',
        "orphans_expired": 'kvindexer_index_orphans_dropped_total{cause="ttl_s"}',
        "speculative_refused": "kvindexer_index_speculative_refused_total",
        "claims_refused": "kvindexer_index_claims_refused_total",
    }
    for key in numbers:
        assert elsewhere.get(key, f"kvindexer_index_{key} ") in text, key


def test_two_applications_do_not_see_each_other() -> None:
    one, other = make_metrics()[0], make_metrics()[0]
    one.observe_match(3)
    key = ("kvindexer_match_depth_blocks_count", ())
    assert (samples(one)[key], samples(other)[key]) == (1, 0)


def test_invented_methods_are_one_label() -> None:
    metrics, _, _ = make_metrics()
    for number in range(50):
        metrics.observe_request(f"INVENTED{number}", "unmatched", 405, 0.001)
    found = [labels for name, labels in samples(metrics) if name == "kvindexer_http_request_seconds_count"]
    assert [dict(labels)["method"] for labels in found] == ["other"]


def test_clock_of_the_engine_ahead_of_ours_is_no_lag() -> None:
    metrics, _, _ = make_metrics()
    metrics.observe_lag(-5.0)
    assert samples(metrics)["kvindexer_event_lag_seconds_sum", ()] == 0


def test_deepest_bucket_holds_a_whole_long_prompt() -> None:
    metrics, _, _ = make_metrics()
    metrics.observe_match(16_384)
    found = samples(metrics)
    assert found["kvindexer_match_depth_blocks_bucket", (("le", "16384.0"),)] == 1
