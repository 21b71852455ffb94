"""What probes and dashboards ask, and errors that belong to no resource."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.schemas.operations import StatsResponse
from app.schemas.problems import Problem
from app.service import IndexerService
from tests.api.conftest import Indexer, removed, stored

TOKENS = list(range(100, 116))


def figure(indexer: Indexer, name: str, **labels: str) -> float:
    """The sample of /metrics with exactly these labels; 0 when there is none."""
    response = indexer.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    return 0.0


def test_health(indexer: Indexer) -> None:
    assert indexer.get("/healthz").json()["status"] == "ok"


def test_stats(indexer: Indexer) -> None:
    indexer.events(stored([1, 2], TOKENS[:8]))
    indexer.depths(TOKENS)
    answer = indexer.get("/v1/stats").json()
    StatsResponse.model_validate(answer, strict=True)
    assert (answer["index"]["prefixes"], answer["queries"]["matches"], answer["pods"]) == (2, 1, 1)
    as_msgpack = indexer.get("/v1/stats", headers={"accept": "application/msgpack"})
    assert as_msgpack.headers["content-type"] == "application/msgpack"


def test_metrics_follow_what_happens(indexer: Indexer) -> None:
    indexer.events(stored([1, 2], TOKENS[:8]), removed(2), ts=0.0, seq=0)
    indexer.events(stored([9], TOKENS[4:8], parent=8), stored([7], TOKENS[:3]), seq=2)
    indexer.depths(TOKENS)
    indexer.depths([1, 2, 3, 4])
    source = {"pod": "pod-a", "dp_rank": "0"}
    assert figure(indexer, "kvindexer_events_total", pod="pod-a", type="BlockStored") == 2
    assert figure(indexer, "kvindexer_events_total", pod="pod-a", type="BlockRemoved") == 1
    assert figure(indexer, "kvindexer_event_blocks_total", pod="pod-a", type="stored") == 2
    assert figure(indexer, "kvindexer_event_blocks_total", pod="pod-a", type="removed") == 1
    assert figure(indexer, "kvindexer_source_rejected_total", **source) == 1
    assert figure(indexer, "kvindexer_source_gaps_total", **source) == 1
    assert figure(indexer, "kvindexer_source_orphans_total", **source) == 1
    assert figure(indexer, "kvindexer_source_state", **source, state="degraded") == 1
    assert figure(indexer, "kvindexer_source_state", **source, state="live") == 0
    assert figure(indexer, "kvindexer_index_prefixes") == 1
    assert figure(indexer, "kvindexer_index_orphan_blocks") == 1
    assert figure(indexer, "kvindexer_index_bytes") > 0
    assert figure(indexer, "kvindexer_match_queries_total") == 2
    assert figure(indexer, "kvindexer_match_hits_total") == 1
    assert figure(indexer, "kvindexer_match_asked_tokens_total") == 20
    assert figure(indexer, "kvindexer_match_matched_tokens_total") == 4
    assert figure(indexer, "kvindexer_match_depth_blocks_count") == 2
    assert figure(indexer, "kvindexer_match_depth_blocks_bucket", le="0.0") == 1
    assert figure(indexer, "kvindexer_event_lag_seconds_count") == 1


def test_rejected_events_are_counted_by_reason(indexer: Indexer) -> None:
    indexer.events(stored([7], TOKENS[:3]))
    families = {f.name: f for f in text_string_to_metric_families(indexer.get("/metrics").text)}
    samples = families["kvindexer_events_rejected"].samples
    assert sum(sample.value for sample in samples) == 1
    assert all(sample.labels["reason"] for sample in samples)


def test_requests_are_counted_by_template(indexer: Indexer) -> None:
    indexer.get("/v1/pods/one")
    indexer.get("/v1/pods/two")
    indexer.get("/no/such/path")
    indexer.request("PATCH", "/v1/match")
    name = "kvindexer_http_request_seconds_count"
    assert figure(indexer, name, method="GET", route="/v1/pods/{pod}", status="404") == 2
    assert figure(indexer, name, method="GET", route="unmatched", status="404") == 1
    assert "/no/such/path" not in indexer.get("/metrics").text


def test_series_of_a_pod_end_with_it(indexer: Indexer) -> None:
    indexer.events(stored([1], TOKENS[:4]))
    assert "pod-a" in indexer.get("/metrics").text
    indexer.request("DELETE", "/v1/pods/pod-a")
    assert "pod-a" not in indexer.get("/metrics").text


def test_ready_without_pods_to_wait_for(indexer: Indexer) -> None:
    assert indexer.get("/readyz").status_code == 200


def test_ready_after_the_time_of_grace(make_indexer: Callable[..., Indexer]) -> None:
    pods = ("pod-a=tcp://127.0.0.1:1,model=m,dp_size=2", "pod-h=,model=m")
    indexer = make_indexer(pods=pods, ready_grace_s=10.0)
    response = indexer.get("/readyz")
    Problem.model_validate(response.json(), strict=True)
    assert response.status_code == 503
    assert [fault["field"] for fault in response.json()["errors"]] == ["pods.pod-a.0", "pods.pod-a.1"]
    assert indexer.get("/healthz").status_code == 200
    indexer.clock.now_s += 9.9
    assert indexer.get("/readyz").status_code == 503
    indexer.clock.now_s += 0.1
    assert indexer.get("/readyz").status_code == 200


def test_ready_when_a_configured_pod_is_deleted(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(pods=("pod-a=tcp://127.0.0.1:1,model=m",))
    assert indexer.get("/readyz").status_code == 503
    indexer.request("DELETE", "/v1/pods/pod-a")
    assert indexer.get("/readyz").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/match", 405),
        ("POST", "/healthz", 405),
        ("PUT", "/v1/pods", 405),
    ],
)
def test_wrong_path_or_method_is_a_problem(indexer: Indexer, method: str, path: str, status: int) -> None:
    response = indexer.request(method, path)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    Problem.model_validate(response.json(), strict=True)
    assert ("allow" in response.headers) == (status == 405)


def test_fault_of_ours_says_nothing_of_the_inside(indexer: Indexer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_self: IndexerService) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(IndexerService, "stats", fail)
    response = indexer.get("/v1/stats")
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/problem+json"
    Problem.model_validate(response.json(), strict=True)
    assert "secret" not in response.text
    monkeypatch.undo()
    name = "kvindexer_http_request_seconds_count"
    assert figure(indexer, name, method="GET", route="/v1/stats", status="500") == 1
