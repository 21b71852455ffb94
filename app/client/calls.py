"""Everything of a call but the waiting: requests out of values, values out of responses, and when to try again.

The blocking client and the asynchronous one differ in how they wait and in nothing else; what they must agree on is
here, without a socket. A call has a budget of time for all of its attempts and the waits between them. Only what may
go through later is tried again: a connection that fails, a response that is late, and the statuses 429, 500, 502,
503 and 504. Any other 4xx is a fault of the request, says nothing about the indexer, and raises Refused; but where a
router asks of pods that the indexer does not know, or not yet, the answer is an empty one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from app.client.circuit import Circuit
from app.client.values import (
    EventsAnswer,
    Load,
    MatchAnswer,
    PodAnswer,
    PodsAnswer,
    PrefixesAnswer,
    Prompt,
    RouteAnswer,
)
from app.errors import UNDECODABLE, Refused, Unresponsive

JSON = "application/json"
MSGPACK = "application/msgpack"
RETRIED = frozenset({429, 500, 502, 503, 504})
# An indexer that has just begun knows no pod: no fault of the request, and a router that fails open goes on.
_NOT_KNOWN_YET = frozenset({"urn:kvindexer:problem:no-candidate", "urn:kvindexer:problem:unknown-pod"})

Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True, slots=True)
class ClientSettings:
    """How long a router is ready to wait for an answer that it can do without."""

    budget_s: float = 0.25  # of one call: attempts and the waits between them together
    attempts_max: int = 2
    backoff_s: float = 0.01  # before the second attempt, twice as long before each further one
    failures_max: int = 5  # failed calls in a row that open the circuit
    open_s: float = 1.0  # that it stays open before one call tries again
    answer_bytes_max: int = 64 * 1024 * 1024
    connections_max: int = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """A request, how its response is read, and the answer without one (None: then it raises Unresponsive).

    Sent and answered `as_json`, else as msgpack.
    """

    method: str
    path: str
    read: Callable[[bytes], Answer]
    body: Any = None
    repeatable: bool = True
    as_json: bool = False
    without: Callable[[str], Answer] | None = None
    passed_on: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def with_headers(self, headers: Mapping[str, str] | None) -> Call[Answer]:
        """Ours win over `headers` of the same name."""
        return dataclasses.replace(self, passed_on=headers) if headers else self

    def content(self) -> bytes | None:
        encode = msgspec.json.encode if self.as_json else msgspec.msgpack.encode
        return None if self.body is None else encode(self.body)

    def headers(self) -> dict[str, str]:
        notation = JSON if self.as_json else MSGPACK
        ours = {"accept": notation, "content-type": notation}
        return {name.lower(): value for name, value in self.passed_on.items()} | ours

    def fail_open(self, cause: str) -> Answer:
        if self.without is None:
            raise Unresponsive(f"{self.method} {self.path}: {cause}")
        return self.without(cause)


@dataclasses.dataclass(slots=True)
class Attempts:
    """The attempts of one call, from its admission on."""

    settings: ClientSettings
    clock: Callable[[], float]
    deadline_s: float
    repeatable: bool
    made: int = 0
    cause: str = ""

    def left_s(self) -> float:
        return self.deadline_s - self.clock()

    def earlier(self) -> str:
        """What went wrong before the budget was spent, to be put behind that."""
        return f"; before that: {self.cause}" if self.cause else ""

    def wait_s(self, cause: str, *, at_least_s: float = 0.0) -> float | None:
        """Seconds to wait before the next attempt; None when there is none, because of the count or the budget."""
        self.made += 1
        self.cause = cause
        if not self.repeatable or self.made >= self.settings.attempts_max:
            return None
        wait_s = max(at_least_s, self.settings.backoff_s * 2 ** (self.made - 1))
        return wait_s if wait_s < self.left_s() else None


def start(settings: ClientSettings, clock: Callable[[], float], call: Call[Any]) -> Attempts:
    return Attempts(settings, clock, clock() + settings.budget_s, call.repeatable)


def authorization(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def limits(settings: ClientSettings) -> httpx.Limits:
    return httpx.Limits(
        max_connections=settings.connections_max, max_keepalive_connections=settings.connections_max
    )


def settle(call: Call[Answer], status: int, content: bytes, circuit: Circuit) -> Answer:
    """The answer that a response carries. Raises Refused, and Unresponsive for what is no answer at all."""
    if status >= 400:
        circuit.succeed()  # it answers, so it is there
        kind, detail = _problem(content)
        if kind in _NOT_KNOWN_YET and call.without is not None:
            return call.without(detail)
        raise Refused(status, detail)
    try:
        answer = call.read(content)
    except UNDECODABLE as error:
        circuit.fail()
        return call.fail_open(f"the answer cannot be read: {error}")
    circuit.succeed()
    return answer


def told(error: httpx.RequestError) -> str:
    """httpx has errors without a word in them."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def retry_after_s(response: httpx.Response) -> float:
    """What the response asks for, in seconds; 0 when it does not say."""
    said = response.headers.get("retry-after", "")
    return float(said) if said.isascii() and said.isdigit() and len(said) < 7 else 0.0


def _problem(content: bytes) -> tuple[str, str]:
    """(type, detail)"""
    try:
        problem = msgspec.json.decode(content)
    except UNDECODABLE:
        return "", content[:500].decode(errors="replace")
    if not isinstance(problem, dict):
        return "", str(problem)
    return str(problem.get("type", "")), str(problem.get("detail", problem))


def _reader(kind: type[Answer]) -> Callable[[bytes], Answer]:
    return msgspec.msgpack.Decoder(kind).decode


def _json_reader(kind: type[Answer]) -> Callable[[bytes], Answer]:
    return msgspec.json.Decoder(kind).decode


_read_match = _reader(MatchAnswer)
_read_json_match = _json_reader(MatchAnswer)
_read_route = _reader(RouteAnswer)
_read_prefixes = _reader(PrefixesAnswer)
_read_events = _json_reader(EventsAnswer)
_read_pod = _reader(PodAnswer)
_read_pods = _reader(PodsAnswer)
_read_stats = _reader(dict[str, Any])


# -- the calls


def match(
    prompt: Prompt, *, pods: Sequence[str] | None, include_hashes: bool, extra: Mapping[str, Any]
) -> Call[MatchAnswer]:
    body = {**_prompt(prompt), **extra}
    if pods is not None:
        body["pods"] = list(pods)
    if include_hashes:
        body["include_hashes"] = True

    def without(cause: str) -> MatchAnswer:
        return MatchAnswer(prompt.model, prompt.lora, degraded=True, cause=cause)

    # As JSON, which costs the indexer a tenth; extra keys may be bytes, which it does not have.
    as_json = "extra_keys" not in body
    read = _read_json_match if as_json else _read_match
    return Call("POST", "/v1/match", read, body, as_json=as_json, without=without)


def route(
    prompt: Prompt,
    *,
    pods: Sequence[str] | None,
    loads: Mapping[str, Load] | None,
    policy: str | None,
    reserve: bool,
    extra: Mapping[str, Any],
) -> Call[RouteAnswer]:
    body = {**_prompt(prompt), "reserve": reserve, **extra}
    if pods is not None:
        body["pods"] = list(pods)
    if loads is not None:
        body["loads"] = {pod: msgspec.to_builtins(load) for pod, load in loads.items()}
    if policy is not None:
        body["policy"] = policy
    return Call(
        "POST", "/v1/route", _read_route, body, without=lambda cause: RouteAnswer(degraded=True, cause=cause)
    )


def prefixes(prompt: Prompt, pod: str, dp_rank: int, ttl_s: float) -> Call[PrefixesAnswer]:
    body = {**_prompt(prompt), "pod": pod, "dp_rank": dp_rank, "ttl_s": ttl_s}
    return Call(
        "POST", "/v1/prefixes", _read_prefixes, body, without=lambda cause: PrefixesAnswer(0, True, cause)
    )


def events(
    pod: str,
    batch: Sequence[Mapping[str, Any]],
    *,
    model: str | None,
    dp_rank: int,
    seq: int | None,
    lora: str | None,
    owner: str | None = None,
) -> Call[EventsAnswer]:
    """Without a `seq` a second attempt could count a copy twice, so there is none."""
    fields = {
        "pod": pod,
        "events": list(batch),
        "model": model,
        "dp_rank": dp_rank,
        "seq": seq,
        "lora": lora,
        "owner": owner,
    }
    body = {name: value for name, value in fields.items() if value is not None}
    # As JSON, because msgpack is the engines' own form on this route.
    return Call("POST", "/v1/events", _read_events, body, repeatable=seq is not None, as_json=True)


def list_pods() -> Call[PodsAnswer]:
    return Call("GET", "/v1/pods", _read_pods)


def get_pod(pod: str) -> Call[PodAnswer]:
    return Call("GET", f"/v1/pods/{quote(pod)}", _read_pod)


def put_pod(pod: str, fields: Mapping[str, Any]) -> Call[PodAnswer]:
    return Call("PUT", f"/v1/pods/{quote(pod)}", _read_pod, dict(fields))


def delete_pod(pod: str) -> Call[None]:
    return Call("DELETE", f"/v1/pods/{quote(pod)}", lambda _content: None)


def stats() -> Call[dict[str, Any]]:
    return Call("GET", "/v1/stats", _read_stats)


def _prompt(prompt: Prompt) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.to_builtins(prompt)
    if prompt.extra_keys is not None:
        body["extra_keys"] = prompt.extra_keys  # whose bytes would be base64 by now
    return body
