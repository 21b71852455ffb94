"""A router as small as one can be: ask the indexer where, send it there, and go on when nobody answers.

It knows one thing by itself, how many of its own requests each pod has, and tells the indexer with every
question. When the indexer does not answer in time the next pod in turn is taken (`alone` counts that): losing the
indexer costs hits, never requests. Of several indexers, replicas of one another, each is asked in turn, and the next
one where that does not answer.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import msgspec

from app.client import AsyncClient, Load, Prompt
from app.demo.traffic import VOCABULARY
from app.errors import Refused, Unresponsive
from app.simulator.words import Words

DELAYS_MAX = 100_000  # newest delays that percentiles are made of


@dataclasses.dataclass(slots=True)
class PodFigures:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failed: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    answer: list[int]
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float


class Router:
    """Of one policy and one fleet: `urls` are the pods' addresses by name. Close none of the clients here."""

    def __init__(
        self,
        indexers: Sequence[AsyncClient],
        http: httpx.AsyncClient,
        model: str,
        urls: Mapping[str, str],
        policy: str,
    ) -> None:
        self.policy = policy
        self.urls = dict(urls)
        self.figures = {pod: PodFigures() for pod in urls}
        self.delays_s: list[float] = []
        self.alone = 0
        self._indexers = list(indexers)
        self._http = http
        self._model = model
        self._words = Words(VOCABULARY)
        self._in_flight = Counter[str]()
        self._turns = itertools.count()
        self._questions = itertools.count()

    def set_pods(self, urls: Mapping[str, str]) -> None:
        """From now on; figures of pods that are gone stay."""
        self.urls = dict(urls)
        for pod in urls:
            self.figures.setdefault(pod, PodFigures())

    def in_flight(self, pod: str) -> int:
        return self._in_flight[pod]

    async def send(self, prompt: list[int], max_tokens: int) -> Served | None:
        """None when the pod did not answer to the end."""
        pod = await self._choose(prompt)
        figures = self.figures[pod]
        self._in_flight[pod] += 1
        try:
            served = await self._stream(pod, prompt, max_tokens)
        except (httpx.HTTPError, Unresponsive):
            figures.failed += 1
            return None
        finally:
            self._in_flight[pod] -= 1
        figures.requests += 1
        figures.prompt_tokens += served.prompt_tokens
        figures.cached_tokens += served.cached_tokens
        self.delays_s.append(served.first_token_s)
        del self.delays_s[:-DELAYS_MAX]
        return served

    async def _choose(self, prompt: list[int]) -> str:
        first = next(self._questions) % len(self._indexers)
        for indexer in self._indexers[first:] + self._indexers[:first]:
            pod = await self._ask(indexer, prompt)
            if pod is not None:
                return pod
        self.alone += 1
        return list(self.urls)[next(self._turns) % len(self.urls)]

    async def _ask(self, indexer: AsyncClient, prompt: list[int]) -> str | None:
        try:
            answer = await indexer.route(
                Prompt(model=self._model, token_ids=prompt),
                pods=list(self.urls),
                loads={pod: Load(running=self._in_flight[pod]) for pod in self.urls},
                policy=self.policy,
            )
        except Refused:
            return None
        return answer.pod if answer.pod in self.urls else None

    async def _stream(self, pod: str, prompt: list[int], max_tokens: int) -> Served:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started_s = time.monotonic()
        first_s: float | None = None
        answer: list[int] = []
        async with self._http.stream("POST", f"{self.urls[pod]}/v1/completions", json=body) as response:
            if response.is_error:
                raise Unresponsive(f"{pod} answered {response.status_code}")
            async for event in _events(response):
                if "error" in event:
                    raise Unresponsive(f"{pod} gave up: {event['error']['message']}")
                if event["choices"]:
                    first_s = first_s or time.monotonic()
                    answer += self._words.encode(event["choices"][0]["text"])
                if "usage" in event:
                    usage = event["usage"]
                    return Served(
                        answer,
                        usage["prompt_tokens"],
                        usage["prompt_tokens_details"]["cached_tokens"],
                        (first_s or time.monotonic()) - started_s,
                    )
        raise Unresponsive(f"{pod} ended its answer without its usage")


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield msgspec.json.decode(line[len("data: ") :])
