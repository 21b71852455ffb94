"""A simulated engine's scheduler: requests in, steps out, each with its duration, its tokens and its events.

One step does what one step of vLLM's scheduler does: every running request computes one more token (or the
next chunk of its prompt), waiting requests are admitted while pages, seats and the token budget last, the
cache's prefix is taken on admission, and the last admitted request is preempted when pages run out.
Finished requests return their pages after the step. Clock-free and deterministic: the caller waits for
`duration_s`, or does not.

`cached_tokens` of a request is the truth that an indexer is measured by: what was found on admission, on
the GPU or in the offload tier, never more than `(prompt - 1) // block_size` blocks.
"""

from __future__ import annotations

import collections
import dataclasses
import zlib
from collections.abc import Sequence

from app.errors import InvalidInput, LimitExceeded, Overloaded
from app.ingest.vllm import WireEvent
from app.simulator.block_names import packed
from app.simulator.engine_settings import EngineSettings
from app.simulator.kv_cache import PagedKVCache
from app.simulator.offload_tier import OffloadTier


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """`full_report` has the engine state reused blocks again (vLLM's kv_cache_report_mode=full)."""

    token_ids: Sequence[int]
    max_tokens: int = 16
    salt: str | None = None
    lora: str | None = None
    full_report: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """What a request got from one step."""

    request: str
    token_ids: tuple[int, ...]
    cached_tokens: int
    finished: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    duration_s: float
    outputs: tuple[Output, ...]
    events: tuple[WireEvent, ...]
    causes: tuple[str | None, ...]  # for each event the request that caused it, if it was one


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    running: int
    waiting: int
    cache_usage: float
    queried_tokens: int
    hit_tokens: int
    offload_queried_tokens: int
    offload_hit_tokens: int
    prompt_tokens: int
    generated_tokens: int
    finished: int
    preemptions: int


@dataclasses.dataclass(slots=True, eq=False)
class _Running:
    """`computed` tokens of prompt and output are in the cache; the last sampled one is not yet.

    `seed` makes its outputs: equal prompts get equal ones, so decoded blocks repeat as at temperature 0.
    """

    name: str
    prompt: Prompt
    seed: int
    outputs: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    cached_tokens: int | None = None  # of the first admission
    is_running: bool = False

    def tokens(self) -> list[int]:
        return [*self.prompt.token_ids, *self.outputs]

    def part(self, count: int) -> Sequence[int]:
        """The next tokens to compute."""
        if self.computed >= len(self.prompt.token_ids):
            start = self.computed - len(self.prompt.token_ids)
            return self.outputs[start : start + count]
        return self.tokens()[self.computed : self.computed + count]

    def length(self) -> int:
        return len(self.prompt.token_ids) + len(self.outputs)


@dataclasses.dataclass(slots=True)
class _Work:
    """What a step adds up to."""

    budget: int
    prefilled: int = 0
    decoded: int = 0
    loaded: int = 0


class Engine:
    """Not thread-safe: one caller submits and steps."""

    def __init__(self, settings: EngineSettings | None = None) -> None:
        self.settings = settings or EngineSettings()
        self.cache = PagedKVCache(self.settings.cache)
        self.offload = OffloadTier(self.settings.offload) if self.settings.offload is not None else None
        self._waiting: collections.deque[_Running] = collections.deque()
        self._running: list[_Running] = []
        self._totals: collections.Counter[str] = collections.Counter()
        self._said: list[tuple[WireEvent, str | None]] = []

    # -- requests

    def submit(self, name: str, prompt: Prompt) -> None:
        """Queue a request. LimitExceeded: it could never fit; Overloaded: too many wait."""
        if not len(prompt.token_ids):
            raise InvalidInput("a prompt has at least one token", field="prompt")
        if prompt.max_tokens < 1:
            raise InvalidInput("max_tokens is at least 1", field="max_tokens")
        packed(prompt.token_ids)  # an impossible token is refused here, not in the middle of a step
        size = self.settings.cache.block_size
        # The last sampled token is never computed, so it takes no place.
        most = -(-(len(prompt.token_ids) + prompt.max_tokens - 1) // size)
        if most > self.settings.cache.capacity_pages:
            raise LimitExceeded(
                f"prompt and output can take {most} pages of {self.settings.cache.capacity_pages} "
                "(capacity_pages)",
                bound="capacity_pages",
            )
        if len(self._waiting) >= self.settings.waiting_max:
            raise Overloaded(f"{len(self._waiting)} requests wait already (waiting_max)")
        tail = repr((len(prompt.token_ids), list(prompt.token_ids[-32:])))
        self._waiting.append(_Running(name, prompt, zlib.crc32(tail.encode())))

    def abort(self, name: str) -> bool:
        """Forget a request; False when it is not here."""
        for queue in (self._running, self._waiting):
            for request in queue:
                if request.name == name:
                    queue.remove(request)
                    self.cache.detach(name)
                    return True
        return False

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    def reset_prefix_cache(self) -> bool:
        """False while requests run. The event is published with the next step, as engines do."""
        return self.cache.reset()

    def step(self) -> Step | None:
        """Run one step; None when there is nothing to do."""
        if self.is_idle:
            return None
        work = _Work(self.settings.step_tokens_max)
        scheduled = self._continue_running(work)
        scheduled += self._admit_waiting(work)
        outputs = [output for request in scheduled if (output := self._advance(request)) is not None]
        self._collect(None)
        events, causes, self._said = [e for e, _ in self._said], [c for _, c in self._said], []
        time = self.settings.time
        return Step(
            duration_s=time.step_s
            + work.prefilled * time.prefill_s_per_token
            + work.decoded * time.decode_s_per_sequence
            + work.loaded * time.load_s_per_token,
            outputs=tuple(outputs),
            events=tuple(events),
            causes=tuple(causes),
        )

    def stats(self) -> EngineStats:
        cache = self.cache.stats()
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            cache_usage=self.cache.usage(),
            queried_tokens=cache.queried_tokens,
            hit_tokens=cache.hit_tokens,
            offload_queried_tokens=self._totals["offload_queried"],
            offload_hit_tokens=self._totals["offload_hit"],
            prompt_tokens=self._totals["prompt"],
            generated_tokens=self._totals["generated"],
            finished=self._totals["finished"],
            preemptions=self._totals["preemptions"],
        )

    # -- one step

    def _continue_running(self, work: _Work) -> list[_Running]:
        scheduled: dict[str, _Running] = {}
        for request in list(self._running):
            part = request.part(work.budget)
            while part and request.is_running:
                try:
                    self.cache.append(request.name, part)
                except LimitExceeded:
                    scheduled.pop(self._preempt_last(), None)
                    continue
                self._collect(request.name)
                request.computed += len(part)
                self._count(work, request, len(part))
                scheduled[request.name] = request
                break
        return list(scheduled.values())

    def _preempt_last(self) -> str:
        """The youngest request gives its pages back and starts again from what is still cached."""
        victim = self._running.pop()
        victim.is_running = False
        self.cache.detach(victim.name)
        victim.computed = 0
        self._waiting.appendleft(victim)
        self._totals["preemptions"] += 1
        return victim.name

    def _admit_waiting(self, work: _Work) -> list[_Running]:
        admitted: list[_Running] = []
        while self._waiting and work.budget > 0 and len(self._running) < self.settings.running_max:
            request = self._waiting[0]
            try:
                self._admit(request, work)
            except LimitExceeded:
                break
            self._waiting.popleft()
            self._running.append(request)
            request.is_running = True
            admitted.append(request)
        return admitted

    def _admit(self, request: _Running, work: _Work) -> None:
        prompt, tokens = request.prompt, request.tokens()
        keys = {"salt": prompt.salt, "lora": prompt.lora}
        on_gpu = self.cache.lookup(tokens, **keys)
        loadable = self._loadable(tokens, **keys)
        behind_gpu = max(0, loadable - on_gpu)
        attached = self.cache.attach(
            request.name,
            tokens,
            compute_max=behind_gpu + work.budget,
            restate=prompt.full_report,
            **keys,
        )
        self._collect(request.name)
        if self.offload is not None:
            self._totals["offload_queried"] += len(tokens) - on_gpu
            self._totals["offload_hit"] += behind_gpu
            if behind_gpu:
                self.offload.load(tokens, **keys)
        request.computed = attached.cached_tokens + attached.computed_tokens
        if request.cached_tokens is None:
            request.cached_tokens = max(on_gpu, loadable)
            self._totals["prompt"] += len(tokens)
        work.loaded += behind_gpu
        self._count(work, request, attached.computed_tokens - behind_gpu)

    def _loadable(self, tokens: Sequence[int], *, salt: str | None, lora: str | None) -> int:
        """Leading tokens that the offload tier can bring back, in whole blocks and without the last token."""
        if self.offload is None:
            return 0
        size = self.settings.cache.block_size
        held = self.offload.lookup(tokens, salt=salt, lora=lora)
        return min(held // size, (len(tokens) - 1) // size) * size

    def _count(self, work: _Work, request: _Running, computed: int) -> None:
        work.budget -= computed
        if request.outputs and computed == 1:
            work.decoded += 1
        else:
            work.prefilled += computed

    def _advance(self, request: _Running) -> Output | None:
        """Sample behind what was computed; None while the prompt is not computed to its end."""
        if request.computed < request.length():
            return None
        if not request.outputs and self.offload is not None:
            prompt = request.prompt
            self.offload.store(prompt.token_ids, salt=prompt.salt, lora=prompt.lora)
            self._collect(request.name)
        sampled = self._sample(request)
        request.outputs += sampled
        self._totals["generated"] += len(sampled)
        finished = len(request.outputs) >= request.prompt.max_tokens
        if finished:
            self._running.remove(request)
            self.cache.detach(request.name)
            self._totals["finished"] += 1
        return Output(request.name, tuple(sampled), request.cached_tokens or 0, finished)

    def _sample(self, request: _Running) -> list[int]:
        """The next token, or with drafts the accepted ones and the one behind them."""
        left = request.prompt.max_tokens - len(request.outputs)
        drafted = min(self.settings.draft_tokens, left - 1) if request.outputs else 0
        if drafted:
            ahead = [self._token(request, offset) for offset in range(drafted)]
            try:
                self.cache.draft(request.name, ahead)
            except LimitExceeded:
                return [self._token(request, 0)]
            # Drafts are always right here, so how many are accepted is drawn from the text instead.
            accepted = self._token(request, drafted) % (drafted + 1)
            self.cache.accept_drafts(request.name, accepted)
            self._collect(request.name)
            request.computed += accepted
            return [*ahead[:accepted], self._token(request, accepted)]
        return [self._token(request, 0)]

    def _token(self, request: _Running, offset: int) -> int:
        position = len(request.outputs) + offset
        return zlib.crc32(position.to_bytes(4, "little"), request.seed) % self.settings.vocabulary

    def _collect(self, cause: str | None) -> None:
        """Put down what caches have to say since the last call."""
        self._said += [(event, cause) for event in self.cache.drain_events()]
        if self.offload is not None:
            self._said += [(event, cause) for event in self.offload.drain_events()]
