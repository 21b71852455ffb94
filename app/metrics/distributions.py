"""What is observed as it happens: how long requests take, how deep matches are, how late batches come."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

REQUEST_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)
DEPTH_BLOCKS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Distribution:
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


class DistributionsCollector(Collector):
    def __init__(
        self, requests: Mapping[tuple[str, str, int], Distribution], depth: Distribution, lag: Distribution
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
