"""The pods' loads, read from their own Prometheus endpoints (`metrics_url`), for requests that bring none.

Every `loads_interval_s` each such pod is asked, at most ASKED_AT_ONCE at a time and each with a deadline. Three
gauges of vLLM's page are of use: vllm:num_requests_running, vllm:num_requests_waiting and
vllm:kv_cache_usage_perc (vllm:gpu_cache_usage_perc before 0.10). Their lines are cut out first, as parsing a whole
page of histograms would stall the loop. One page tells of every rank by the label `engine`; several models
of one rank are added up.

A pod that fails keeps its last load until that is stale (`loads_stale_s`), and has none then. Redirects are not
followed: a pod does not choose what we ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

from app.bounded_read import get_at_most
from app.config import Settings
from app.pods import PodSpec
from app.routing.routing import Load

logger = logging.getLogger(__name__)

ASKED_AT_ONCE = 32
TIMEOUT_S = 2.0
RANKS_MAX = 1_024  # of one page

_LINES = re.compile(
    rb"^(?:# TYPE )?vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc|gpu_cache_usage_perc)"
    rb"[ {].*$",
    re.MULTILINE,
)
_FIELDS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:gpu_cache_usage_perc": "kv_usage",
}


class Loads:
    """Made and used on the event loop; `pods` gives the specs of the pods that are registered now."""

    def __init__(
        self, settings: Settings, *, pods: Callable[[], Iterable[PodSpec]], clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._pods = pods
        self._clock = clock
        self._known: dict[str, tuple[float, str, dict[int, Load]]] = {}  # pod -> when, where, by rank
        self._counts: Counter[str] = Counter({"polls": 0, "failures": 0})
        self._failing: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="loads")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def load(self, pod: str, dp_rank: int) -> Load | None:
        """None when it is not known, or stale."""
        at_s, _, ranks = self._known.get(pod, (0.0, "", {}))
        if not ranks or self._clock() - at_s > self._settings.loads_stale_s:
            return None
        return ranks.get(dp_rank)

    def gauges(self) -> Mapping[str, int]:
        fresh_s = self._clock() - self._settings.loads_stale_s
        return {"known": sum(at_s >= fresh_s for at_s, _, _ in self._known.values())}

    def counters(self) -> Mapping[str, int]:
        return self._counts

    async def poll(self, client: httpx.AsyncClient) -> None:
        """Asks every pod that has a `metrics_url` once."""
        urls = {spec.name: spec.metrics_url for spec in self._pods() if spec.metrics_url is not None}
        for gone in [pod for pod, (_, url, _) in self._known.items() if urls.get(pod) != url]:
            del self._known[gone]
        self._failing &= urls.keys()
        slots = asyncio.Semaphore(ASKED_AT_ONCE)

        async def ask(pod: str, url: str) -> None:
            async with slots:
                await self._ask(client, pod, url)

        async with asyncio.TaskGroup() as group:
            for pod, url in urls.items():
                group.create_task(ask(pod, url))

    async def _run(self) -> None:
        client: httpx.AsyncClient | None = None
        async with contextlib.AsyncExitStack() as held:
            while True:
                if client is None and any(spec.metrics_url is not None for spec in self._pods()):
                    # Made late: it costs 16 ms, and most have nobody to ask.
                    client = httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False)
                    await held.enter_async_context(client)
                if client is not None:
                    try:
                        await self.poll(client)
                    except Exception:  # the outermost of this task: it outlives a fault of ours, and says so
                        logger.exception("a look at the pods' loads failed")
                        self._counts["failures"] += 1
                await asyncio.sleep(self._settings.loads_interval_s)

    async def _ask(self, client: httpx.AsyncClient, pod: str, url: str) -> None:
        self._counts["polls"] += 1
        try:
            async with asyncio.timeout(TIMEOUT_S):
                page = await _page(client, url, self._settings.loads_bytes_max)
            ranks = read_loads(page)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError) as error:
            self._counts["failures"] += 1
            if pod not in self._failing:
                self._failing.add(pod)
                said = str(error) or type(error).__name__
                logger.warning(
                    "the load of pod %s cannot be read at %s: %s", pod, url, said, extra={"pod": pod}
                )
            return
        self._failing.discard(pod)
        self._known[pod] = (self._clock(), url, ranks)


def read_loads(page: bytes) -> dict[int, Load]:
    """Rank -> load. Raises ValueError for a page without loads, or with what is no number of Prometheus."""
    found: dict[int, dict[str, float]] = {}
    for family in text_string_to_metric_families(b"\n".join([*_LINES.findall(page), b""]).decode()):
        for sample in family.samples:
            field = _FIELDS.get(sample.name)
            dp_rank = _rank(sample.labels.get("engine", "0"))
            if field is None or dp_rank is None or not 0 <= sample.value < float("inf"):
                continue
            values = found.setdefault(dp_rank, {})
            values[field] = values.get(field, 0.0) + sample.value
            if len(found) > RANKS_MAX:
                raise ValueError(f"more than {RANKS_MAX} ranks in one page")
    if not found:
        raise ValueError("the page has none of vLLM's gauges of requests and KV cache usage")
    return {dp_rank: Load(**values) for dp_rank, values in found.items()}


def _rank(label: str) -> int | None:
    return int(label) if label.isascii() and label.isdigit() and len(label) < 6 else None


async def _page(client: httpx.AsyncClient, url: str, bytes_max: int) -> bytes:
    page = await get_at_most(client, url, bytes_max)
    if page is None:
        raise ValueError(f"the page is longer than loads_bytes_max = {bytes_max} bytes")
    return page
