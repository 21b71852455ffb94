"""What the API calls: a model and a prompt in, token ids out.

Where a model's tokenizer is, in this order: `tokenizers` of the settings; else, when `tokenizer_hub` is on
and a registered pod serves the model, the model's own name, as an absolute path or a repository of the hub.
A name that merely stands in a request is never looked up anywhere.

Prompts come again: the same text is asked about by match and by route, and by each router. Token ids of
recent prompts are kept (`tokenizer_cache_bytes_max`, least recently used first out), by a 128-bit digest of the
prompt as it came, and equal prompts that arrive together are tokenised once. A tokenizer that could not be
had is not asked for again for `tokenizer_retry_s`.

Cost on the event loop: a digest of the prompt's bytes (about 1 us a KB), and a write and a read of a pipe.
Prompts longer than CACHED_BYTES_MAX are not cached, as their digest alone would be a stall.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

import msgspec

from app.config import Settings
from app.errors import IndexerError, InvalidInput, LimitExceeded, Overloaded, TokenizerUnavailable
from app.observability.correlation import CURRENT
from app.observability.tracing import step
from app.tokenizer.process import TokenizerProcess
from app.tokenizer.prompts import Answer, Fault, Job, Prompt

CACHED_BYTES_MAX = 1_048_576
FAILURES_MAX = 1_000
_ENTRY_BYTES = 200  # of the cache, beside the token ids

_Key = tuple[str, bytes]
_encoder = msgspec.msgpack.Encoder()


class Tokenizer:
    """All calls are made on one event loop. `serves` tells whether a registered pod serves a model."""

    def __init__(
        self, settings: Settings, *, serves: Callable[[str], bool], clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._sources = settings.tokenizer_sources()
        self._serves = serves
        self._clock = clock
        self._processes = [
            TokenizerProcess(
                tokenizers_max=settings.tokenizers_max,
                timeout_s=settings.tokenizer_timeout_s,
                log_level=settings.log_level,
                log_format=settings.log_format,
            )
            for _ in range(settings.tokenizer_processes)
        ]
        self._idle = list(self._processes)
        self._free = asyncio.Semaphore(len(self._idle))
        self._running: dict[_Key, asyncio.Task[bytes]] = {}
        self._cache: OrderedDict[_Key, bytes] = OrderedDict()
        self._cache_bytes = 0
        self._failures: OrderedDict[str, tuple[float, Answer]] = OrderedDict()  # source -> until, why
        self._answered: set[str] = set()  # sources that were loaded once; as bounded as settings and pods
        self._counts: Counter[str] = Counter()

    async def token_ids(self, model: str, prompt: Prompt) -> bytes:
        """uint32, little-endian. Raises InvalidInput, LimitExceeded, Overloaded, TokenizerUnavailable."""
        source = self._sources.get(model, model)
        key = _key(source, prompt)
        found = None if key is None else self._cache.get(key)
        if key is not None and found is not None:
            self._cache.move_to_end(key)
            self._counts["cache_hits"] += 1
            return found
        self._check(model, source)
        task = None if key is None else self._running.get(key)
        if task is None:
            if len(self._running) >= self._settings.tokenizer_queue_max:
                self._counts["refused"] += 1
                bound = f"tokenizer_queue_max = {self._settings.tokenizer_queue_max}"
                raise Overloaded(f"{bound} prompts wait to be tokenised")
            task = self._begin(key or (source, os.urandom(16)), source, prompt, cached=key is not None)
        # A caller that leaves does not take the answer from the others.
        return await asyncio.shield(task)

    def gauges(self) -> Mapping[str, int]:
        return {
            "waiting": len(self._running),
            "cache_entries": len(self._cache),
            "cache_bytes": self._cache_bytes,
        }

    def counters(self) -> Mapping[str, int]:
        return {**self._counts, "starts": sum(process.starts for process in self._processes)}

    async def close(self) -> None:
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        for process in self._processes:
            await process.close()

    def _check(self, model: str, source: str) -> None:
        """Whether it is worth asking a process at all."""
        if model not in self._sources and not (self._settings.tokenizer_hub and self._serves(model)):
            known = "name one in KVINDEXER_TOKENIZERS, or register a pod that serves it"
            raise InvalidInput(f"no tokenizer is known for model {model!r}: {known}", field="model")
        until_s, failure = self._failures.get(source, (0.0, None))
        if failure is not None:
            if self._clock() < until_s:
                raise self._error(failure)
            del self._failures[source]

    def _begin(self, key: _Key, source: str, prompt: Prompt, *, cached: bool) -> asyncio.Task[bytes]:
        task = asyncio.create_task(self._tokenise(key, source, prompt, cached=cached), name="tokenise")
        self._running[key] = task
        task.add_done_callback(lambda done: self._end(key, done))
        return task

    def _end(self, key: _Key, task: asyncio.Task[bytes]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # retrieved here too: all who waited for it may have left

    async def _tokenise(self, key: _Key, source: str, prompt: Prompt, *, cached: bool) -> bytes:
        self._counts["cache_misses"] += cached
        job = Job(source, self._settings.tokens_max, prompt, CURRENT.get())
        with step("tokenize"):
            answer = await self._ask(job)
        self._counts["loads"] += answer.loaded
        self._counts["unloads"] += answer.evicted
        if answer.fault in (Fault.UNUSABLE, Fault.UNAVAILABLE):
            self._counts["failures"] += 1
            self._remember(source, answer)
        else:
            self._answered.add(source)
        if answer.fault is not None:
            raise self._error(answer)
        if cached:
            self._keep(key, answer.token_ids)
        return answer.token_ids

    async def _ask(self, job: Job) -> Answer:
        async with self._free:
            process = self._idle.pop()
            try:
                return await process.ask(job)
            except TokenizerUnavailable as error:
                self._counts["failures"] += 1
                # Of a source that has worked before, it was this prompt: the next ones deserve their try.
                if job.source not in self._answered:
                    self._remember(job.source, Answer(fault=Fault.UNAVAILABLE, detail=str(error)))
                raise
            finally:
                self._idle.append(process)

    def _error(self, answer: Answer) -> IndexerError:
        if answer.fault is Fault.TOO_LONG:
            bound = f"tokens_max = {self._settings.tokens_max}"
            return LimitExceeded(f"{answer.detail}, more than {bound}", bound="tokens_max")
        if answer.fault is Fault.REFUSED:
            return InvalidInput(answer.detail, field=answer.field)
        if answer.fault is Fault.UNUSABLE:
            return InvalidInput(answer.detail, field="model")
        return TokenizerUnavailable(answer.detail)

    def _remember(self, source: str, answer: Answer) -> None:
        self._failures[source] = (self._clock() + self._settings.tokenizer_retry_s, answer)
        while len(self._failures) > FAILURES_MAX:
            self._failures.popitem(last=False)

    def _keep(self, key: _Key, token_ids: bytes) -> None:
        self._cache[key] = token_ids
        self._cache_bytes += len(token_ids) + _ENTRY_BYTES
        while self._cache_bytes > self._settings.tokenizer_cache_bytes_max:
            _, oldest = self._cache.popitem(last=False)
            self._cache_bytes -= len(oldest) + _ENTRY_BYTES
            self._counts["cache_evictions"] += 1


def _key(source: str, prompt: Prompt) -> _Key | None:
    parts = (prompt.text, prompt.messages, prompt.tools, prompt.template_arguments)
    if sum(len(part) for part in parts if part is not None) > CACHED_BYTES_MAX:
        return None
    return source, hashlib.blake2b(_encoder.encode(prompt), digest_size=16).digest()
