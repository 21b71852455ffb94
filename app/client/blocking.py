"""The client for a router with threads, and for scripts.

An event loop could enforce one deadline; sockets can only bound each wait. So every wait is bounded by what is left of
the budget, and the deadline is checked between two reads. A peer that sends its headers byte by byte could still stretch
a call; a router that does not trust its indexer that far uses the asynchronous client.
"""

from __future__ import annotations

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


class Client:
    """Connections to one indexer; safe to share between threads. See `app.client` for what a call may raise.

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
        self._http = httpx.Client(
            base_url=url,
            headers=calls.authorization(api_key),
            limits=calls.limits(self.settings),
            verify=True if tls is None else tls,
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # -- what a router asks

    def match(
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
        return self._ask(call.with_headers(headers))

    def route(
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
        return self._ask(call.with_headers(headers))

    def prefixes(
        self,
        prompt: Prompt,
        pod: str,
        *,
        dp_rank: int = 0,
        ttl_s: float = 2.0,
        headers: Mapping[str, str] | None = None,
    ) -> PrefixesAnswer:
        """Says that the prompt was sent to a pod. Fails open."""
        return self._ask(calls.prefixes(prompt, pod, dp_rank, ttl_s).with_headers(headers))

    # -- what must not be lost: raises Unresponsive

    def events(
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
        return self._ask(
            calls.events(pod, events, model=model, dp_rank=dp_rank, seq=seq, lora=lora, owner=owner)
        )

    def pods(self) -> tuple[PodAnswer, ...]:
        return self._ask(calls.list_pods()).pods

    def pod(self, name: str) -> PodAnswer:
        return self._ask(calls.get_pod(name))

    def put_pod(self, name: str, **fields: Any) -> PodAnswer:
        """Registers a pod; `fields` are those of `PUT /v1/pods/{pod}`."""
        return self._ask(calls.put_pod(name, fields))

    def delete_pod(self, name: str) -> None:
        self._ask(calls.delete_pod(name))

    def stats(self) -> dict[str, Any]:
        return self._ask(calls.stats())

    # -- attempts

    def _ask(self, call: Call[Answer]) -> Answer:
        if not self.circuit.admit():
            return call.fail_open("the circuit is open: the indexer did not answer lately")
        attempts = calls.start(self.settings, self._clock, call)
        response = self._attempt(call, attempts)
        if response is None:
            self.circuit.fail()
            return call.fail_open(attempts.cause)
        return calls.settle(call, *response, self.circuit)

    def _attempt(self, call: Call[Any], attempts: Attempts) -> tuple[int, bytes] | None:
        """Status and body of the first response that is not to be tried again; None when there is none."""
        content, headers = call.content(), call.headers()
        while True:
            try:
                left_s = max(attempts.left_s(), 0.001)
                with self._http.stream(
                    call.method, call.path, content=content, headers=headers, timeout=left_s
                ) as response:
                    body = bytearray()
                    for chunk in response.iter_bytes():
                        body += chunk
                        if len(body) > self.settings.answer_bytes_max:
                            attempts.cause = f"an answer of more than {self.settings.answer_bytes_max} bytes"
                            return None
                        if attempts.left_s() <= 0:
                            attempts.cause = f"no whole answer within {self.settings.budget_s:g} s"
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
            time.sleep(wait_s)
