"""The metrics of one application: what its parts call, and what a scrape gets."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, generate_latest
from prometheus_client.process_collector import ProcessCollector

from app.metrics.distributions import (
    DEPTH_BLOCKS,
    LAG_SECONDS,
    REQUEST_SECONDS,
    Distribution,
    DistributionsCollector,
)
from app.metrics.figures import Figures, FiguresCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})


class Metrics:
    """The metrics of one application. All calls are made from the service's thread."""

    def __init__(self, figures: Figures) -> None:
        # A second series for each counter and histogram, which says only when it began: the uptime does.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._requests: dict[tuple[str, str, int], Distribution] = {}  # method, route, status
        self._depth = Distribution(DEPTH_BLOCKS)
        self._lag = Distribution(LAG_SECONDS)
        self._ticks_failed = Counter(
            "kvindexer_ticks_failed", "Timer slices that ended in a fault of ours", registry=self._registry
        )
        self._registry.register(FiguresCollector(figures))
        self._registry.register(DistributionsCollector(self._requests, self._depth, self._lag))

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        key = (method if method in _METHODS else "other", route, status)
        series = self._requests.get(key)
        if series is None:
            series = self._requests[key] = Distribution(REQUEST_SECONDS)
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
