"""The client for a router on an event loop."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from app.client import calls
from app.client.calls import Answer, Attempts, Call, ClientSettings
from app.client.circuit import Circuit
from app.client.values import (
    EventsAnswer,
    Load,
    MatchAnswer,
    PodAnswer,
    PrefixesAnswer,
    Prompt,
    RouteAnswer,
)


class AsyncClient:
    """Connections to one indexer; of one event loop. See `app.client` for what every call may raise.

    `tls` is for an indexer whose certificate no public authority has signed, or that asks for one of the client.
    `clock` gives monotonic seconds, for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        settings: ClientSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or ClientSettings()
        self.circuit = Circuit(
            failures_max=self.settings.failures_max, open_s=self.settings.open_s, clock=clock
        )
        self._clock = clock
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=calls.authorization(api_key),
            limits=calls.limits(self.settings),
            timeout=None,  # the budget is one deadline over everything
            verify=True if tls is None else tls,
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    # -- what a router asks

    async def match(
        self,
        prompt: Prompt,
        *,
        pods: Sequence[str] | None = None,
        include_hashes: bool = False,
        headers: Mapping[str, str] | None = None,
        **extra: Any,
    ) -> MatchAnswer:
        """Who holds the longest leading part of the prompt? Fails open.

        `headers` go along, here and below: `X-Request-ID` and `traceparent` of the request that is being routed.
        """
        call = calls.match(prompt, pods=pods, include_hashes=include_hashes, extra=extra)
        return await self._ask(call.with_headers(headers))

    async def route(
        self,
        prompt: Prompt,
        *,
        pods: Sequence[str] | None = None,
        loads: Mapping[str, Load] | None = None,
        policy: str | None = None,
        reserve: bool = True,
        headers: Mapping[str, str] | None = None,
        **extra: Any,
    ) -> RouteAnswer:
        """Where to send the prompt. Fails open: `pod` is None then."""
        call = calls.route(prompt, pods=pods, loads=loads, policy=policy, reserve=reserve, extra=extra)
        return await self._ask(call.with_headers(headers))

    async def prefixes(
        self,
        prompt: Prompt,
        pod: str,
        *,
        dp_rank: int = 0,
        ttl_s: float = 2.0,
        headers: Mapping[str, str] | None = None,
    ) -> PrefixesAnswer:
        """Says that the prompt was sent to a pod. Fails open."""
        return await self._ask(calls.prefixes(prompt, pod, dp_rank, ttl_s).with_headers(headers))

    # -- what must not be lost: raises Unresponsive

    async def events(
        self,
        pod: str,
        events: Sequence[Mapping[str, Any]],
        *,
        model: str | None = None,
        dp_rank: int = 0,
        seq: int | None = None,
        lora: str | None = None,
        owner: str | None = None,
    ) -> EventsAnswer:
        """A batch of one rank's events; tried again only with a `seq`, which makes it count once."""
        return await self._ask(
            calls.events(pod, events, model=model, dp_rank=dp_rank, seq=seq, lora=lora, owner=owner)
        )

    async def pods(self) -> tuple[PodAnswer, ...]:
        return (await self._ask(calls.list_pods())).pods

    async def pod(self, name: str) -> PodAnswer:
        return await self._ask(calls.get_pod(name))

    async def put_pod(self, name: str, **fields: Any) -> PodAnswer:
        """Registers a pod; `fields` are those of `PUT /v1/pods/{pod}`."""
        return await self._ask(calls.put_pod(name, fields))

    async def delete_pod(self, name: str) -> None:
        await self._ask(calls.delete_pod(name))

    async def stats(self) -> dict[str, Any]:
        return await self._ask(calls.stats())

    # -- attempts

    async def _ask(self, call: Call[Answer]) -> Answer:
        if not self.circuit.admit():
            return call.fail_open("the circuit is open: the indexer did not answer lately")
        attempts = calls.start(self.settings, self._clock, call)
        try:
            async with asyncio.timeout(self.settings.budget_s):
                response = await self._attempt(call, attempts)
        except TimeoutError:
            response = None
            attempts.cause = f"no answer within {self.settings.budget_s:g} s" + attempts.earlier()
        if response is None:
            self.circuit.fail()
            return call.fail_open(attempts.cause)
        return calls.settle(call, *response, self.circuit)

    async def _attempt(self, call: Call[Any], attempts: Attempts) -> tuple[int, bytes] | None:
        """Status and body of the first response that is not to be tried again; None when there is none."""
        content, headers = call.content(), call.headers()
        while True:
            try:
                async with self._http.stream(
                    call.method, call.path, content=content, headers=headers
                ) as response:
                    body = bytearray()
                    async for chunk in response.aiter_bytes():
                        body += chunk
                        if len(body) > self.settings.answer_bytes_max:
                            attempts.cause = f"an answer of more than {self.settings.answer_bytes_max} bytes"
                            return None
                if response.status_code not in calls.RETRIED:
                    return response.status_code, bytes(body)
                wait_s = attempts.wait_s(
                    f"the indexer answered {response.status_code}", at_least_s=calls.retry_after_s(response)
                )
            except httpx.RequestError as error:
                wait_s = attempts.wait_s(calls.told(error))
            if wait_s is None:
                return None
            await asyncio.sleep(wait_s)
