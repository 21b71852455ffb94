"""A simulated pod in virtual time: the paged KV cache of app/simulator and the time its steps would take.

The engine of app/simulator computes every token of every step, which a trace of millions of decoded tokens
makes too slow to compare policies with. Here steps are computed in runs: prompts in chunks of the token
budget, first come first served, beside the sequences that decode; and while nothing but decoding goes on, all
steps up to the next end of a block or a sequence at once. An arrival cuts such a run at the next step. What
is kept of the engine: its cache (pages, copies, evictions and their events), the constants of its TimeModel,
seats, the token budget, preemption of the youngest when pages run out.

What is simpler: a prompt is looked up, and its pages are taken, when it arrives and not with the next step,
unless it has to wait for a seat or for pages. What the pod has told is then all that it holds at every
moment in which somebody can ask, so a prediction that differs from `cached_tokens` is the indexer's fault.
Requests that had to wait say so (`waited`): their prefix is looked up later than it was asked for.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import math

from app.errors import LimitExceeded
from app.ingest.vllm import WireEvent
from app.simulator.engine_settings import EngineSettings
from app.simulator.kv_cache import PagedKVCache


@dataclasses.dataclass(slots=True, eq=False)
class VirtualRequest:
    """Times are virtual seconds. `cached_tokens` is None until the prompt was looked up."""

    name: str
    arrived_s: float
    prompt: array.array[int]
    output: array.array[int]
    cached_tokens: int | None = None
    first_token_s: float | None = None
    waited: bool = False
    uncomputed_tokens: int = 0  # of the prompt, and of the output when it was preempted
    generated: int = 0

    def tokens(self) -> array.array[int]:
        """All that is to be computed before the next one can be sampled."""
        return self.prompt + self.output[: self.generated] if self.generated else self.prompt


@dataclasses.dataclass(slots=True)
class _Run:
    """`steps` equal steps from `start_s` on; `chunks` are the prompt tokens that the first one computes."""

    start_s: float
    step_s: float
    steps: int
    chunks: list[tuple[VirtualRequest, int]]
    decoding: list[VirtualRequest]

    @property
    def end_s(self) -> float:
        return self.start_s + self.steps * self.step_s


class VirtualPod:
    """Not thread-safe. `advance` before every `submit`, with times that never fall."""

    def __init__(self, name: str, settings: EngineSettings) -> None:
        self.name = name
        self.settings = settings
        self.cache = PagedKVCache(settings.cache)
        self.preemptions = 0
        self._now_s = 0.0
        self._running: list[VirtualRequest] = []
        self._waiting: collections.deque[VirtualRequest] = collections.deque()
        self._run: _Run | None = None

    @property
    def now_s(self) -> float:
        return self._now_s

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def drain_events(self) -> list[WireEvent]:
        return self.cache.drain_events()

    def submit(self, request: VirtualRequest) -> None:
        """At the time of the last advance. Raises LimitExceeded for a request that could never fit."""
        self._check_fits(request)
        if self._run is not None and self._run.steps > 1:
            done = math.ceil((self._now_s - self._run.start_s) / self._run.step_s)
            self._run.steps = max(1, min(self._run.steps, done))
        if self._waiting or not self._admit(request):
            request.waited = True
            self._waiting.append(request)

    def advance(self, until_s: float) -> None:
        """Everything that is over at `until_s` has happened; math.inf ends all requests."""
        while True:
            if self._run is None:
                self._run = self._plan()
            if self._run is None or self._run.end_s > until_s:
                break
            run, self._run = self._run, None
            self._now_s = run.end_s
            self._apply(run)
            while self._waiting and self._admit(self._waiting[0]):
                self._waiting.popleft()
        if until_s < math.inf:
            self._now_s = until_s

    # -- admission

    def _check_fits(self, request: VirtualRequest) -> None:
        size = self.settings.cache.block_size
        pages = -(-(len(request.prompt) + len(request.output) - 1) // size)
        if pages > self.settings.cache.capacity_pages:
            raise LimitExceeded(
                f"{request.name} can take {pages} pages of {self.settings.cache.capacity_pages}",
                bound="capacity_pages",
            )

    def _admit(self, request: VirtualRequest) -> bool:
        if len(self._running) >= self.settings.running_max:
            return False
        try:
            attached = self.cache.attach(request.name, request.tokens())
        except LimitExceeded:
            return False
        if request.cached_tokens is None:
            request.cached_tokens = attached.cached_tokens
        request.uncomputed_tokens = attached.computed_tokens
        self._running.append(request)
        return True

    def _preempt_youngest(self) -> VirtualRequest:
        victim = self._running.pop()
        self.cache.detach(victim.name)
        self._waiting.appendleft(victim)
        self.preemptions += 1
        return victim

    # -- steps

    def _plan(self) -> _Run | None:
        if not self._running:
            return None
        time, size = self.settings.time, self.settings.cache.block_size
        decoding = [request for request in self._running if not request.uncomputed_tokens]
        budget = self.settings.step_tokens_max - len(decoding)
        chunks: list[tuple[VirtualRequest, int]] = []
        for request in self._running:
            if request.uncomputed_tokens and budget > 0:
                chunk = min(budget, request.uncomputed_tokens)
                chunks.append((request, chunk))
                budget -= chunk
        step_s = time.step_s + len(decoding) * time.decode_s_per_sequence
        if chunks:
            step_s += sum(chunk for _, chunk in chunks) * time.prefill_s_per_token
            return _Run(self._now_s, step_s, 1, chunks, decoding)
        steps = min(
            min(
                len(request.output) - request.generated,
                size - (len(request.prompt) + request.generated - 1) % size,
            )
            for request in decoding
        )
        return _Run(self._now_s, step_s, steps, [], decoding)

    def _apply(self, run: _Run) -> None:
        for request in run.decoding:
            self._decode(request, run.steps)
        for request, chunk in run.chunks:
            if request not in self._running:
                continue  # preempted by a sequence that needed its pages
            request.uncomputed_tokens -= chunk
            if not request.uncomputed_tokens:
                if request.first_token_s is None:
                    request.first_token_s = self._now_s
                request.generated += 1
                self._end_if_done(request)

    def _decode(self, request: VirtualRequest, steps: int) -> None:
        """Each step computes the last sampled token and samples the next."""
        start = request.generated - 1
        while request in self._running:
            try:
                self.cache.append(request.name, request.output[start : start + steps])
            except LimitExceeded:
                self._preempt_youngest()
                continue
            request.generated += steps
            self._end_if_done(request)
            return

    def _end_if_done(self, request: VirtualRequest) -> None:
        if request.generated >= len(request.output):
            self._running.remove(request)
            self.cache.detach(request.name)
