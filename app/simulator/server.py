"""The HTTP face of a simulated pod: what a router, a client and an operator find on a vLLM server.

    POST /v1/completions, /v1/chat/completions   also streamed; `usage.prompt_tokens_details.cached_tokens` is the truth
    POST /tokenize, GET /v1/models, /version, /health, /metrics, /kv_event_sources
    GET /connector                               hints saved and pending, by rank
    POST /reset_prefix_cache                     {"success": false} while requests run
    GET, POST /faults                            drop, duplicate or delay events, cut replays short, crash, start, restart

Header `X-data-parallel-rank` picks a rank. A pod that crashed answers 503 to everything but /faults.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from app.errors import UNDECODABLE, IndexerError, InvalidInput, LimitExceeded, Overloaded, Unresponsive
from app.simulator.answers import CHAT, COMPLETION, Answer, json_response
from app.simulator.bodies import (
    ChatBody,
    Common,
    CompletionBody,
    FaultsBody,
    TokenizeBody,
    error_body,
    single_prompt,
)
from app.simulator.engine import Prompt
from app.simulator.pod import Pod
from app.simulator.pod_metrics import PodMetrics
from app.simulator.words import Words

DEFAULT_MAX_TOKENS = 16
CLIENT_CLOSED_REQUEST = 499  # as nginx calls it
BODY_BYTES_MAX = 32 * 1024 * 1024

Body = TypeVar("Body", bound=msgspec.Struct)
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class UnknownModel(InvalidInput):
    """A request names a model that the pod does not serve."""


class PodServer:
    """`app` is the ASGI application of one pod."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self.words = Words(pod.settings.engine.vocabulary)
        self.metrics = PodMetrics(pod)
        self._numbers = itertools.count()
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
                Route("/v1/chat/completions", self._guarded(self.chat_completions), methods=["POST"]),
                Route("/tokenize", self._guarded(self.tokenize), methods=["POST"]),
                Route("/v1/models", self._guarded(self.models)),
                Route("/health", self._guarded(self.health)),
                Route("/metrics", self._guarded(self.scrape)),
                Route("/kv_event_sources", self._guarded(self.kv_event_sources)),
                Route("/connector", self._guarded(self.connector)),
                Route("/reset_prefix_cache", self._guarded(self.reset_prefix_cache), methods=["POST"]),
                Route("/faults", self.read_faults),
                Route("/faults", _answering(self.set_faults), methods=["POST"]),
            ]
        )

    # -- inference

    async def completions(self, request: Request) -> Response:
        body = await _read(request, CompletionBody)
        text = single_prompt(body.prompt)
        tokens = self.words.encode(text) if isinstance(text, str) else text
        asked = _prompt(self.pod, body, tokens, body.max_tokens)
        answer = Answer(self.pod, self.metrics, self.words, body, asked, _dp_rank(request))
        return await answer.respond(COMPLETION, f"cmpl-{next(self._numbers)}")

    async def chat_completions(self, request: Request) -> Response:
        body = await _read(request, ChatBody)
        tokens = self.words.encode_chat([{"role": m.role, "content": m.text} for m in body.messages])
        longest = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        asked = _prompt(self.pod, body, tokens, longest)
        answer = Answer(self.pod, self.metrics, self.words, body, asked, _dp_rank(request))
        return await answer.respond(CHAT, f"chatcmpl-{next(self._numbers)}")

    async def tokenize(self, request: Request) -> Response:
        body = await _read(request, TokenizeBody)
        if body.messages is not None:
            tokens = self.words.encode_chat([{"role": m.role, "content": m.text} for m in body.messages])
        else:
            tokens = self.words.encode(body.prompt or "")
        longest = self.pod.settings.max_tokens_total
        return json_response({"count": len(tokens), "max_model_len": longest, "tokens": tokens})

    async def models(self, _: Request) -> Response:
        names = (self.pod.settings.model, *self.pod.settings.adapters)
        return json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})

    # -- operation

    async def health(self, _: Request) -> Response:
        return Response(status_code=200)

    async def scrape(self, _: Request) -> Response:
        return Response(self.metrics.scrape(), media_type="text/plain; version=0.0.4")

    async def kv_event_sources(self, _: Request) -> Response:
        its = self.pod.settings
        return json_response(
            {
                str(dp_rank): {
                    "enable_kv_cache_events": True,
                    "publisher": "zmq",
                    "endpoint": publisher.endpoint,
                    "replay_endpoint": publisher.replay_endpoint,
                    "buffer_steps": its.buffer_steps,
                    "hwm": publisher.settings.hwm_messages,
                    "max_queue_size": publisher.settings.queue_batches_max,
                    "topic": its.topic,
                }
                for dp_rank, publisher in enumerate(self.pod.publishers)
            }
        )

    async def connector(self, _: Request) -> Response:
        return json_response([msgspec.to_builtins(rank.connector.stats()) for rank in self.pod.ranks])

    async def reset_prefix_cache(self, _: Request) -> Response:
        return json_response({"success": self.pod.reset_prefix_cache()})

    # -- faults

    async def read_faults(self, _: Request) -> Response:
        return json_response(
            {
                "up": self.pod.is_up,
                "ranks": [
                    {"dp_rank": rank.dp_rank, "next_seq": rank.next_seq, **msgspec.to_builtins(rank.faults)}
                    for rank in self.pod.ranks
                ],
            }
        )

    async def set_faults(self, request: Request) -> Response:
        body = await _read(request, FaultsBody)
        ranks = [r for r in self.pod.ranks if body.dp_rank is None or r.dp_rank == body.dp_rank]
        if not ranks:
            raise InvalidInput(f"there is no rank {body.dp_rank}", field="dp_rank")
        for rank in ranks:
            for name in ("drop_next", "duplicate_next", "lag_s"):
                value = getattr(body, name)
                if value is not None:
                    if value < 0:
                        raise InvalidInput(f"{name} is not negative", field=name)
                    setattr(rank.faults, name, value)
            if body.truncate_replays is not msgspec.UNSET and self.pod.is_up:
                for publisher in self.pod.publishers[rank.dp_rank : rank.dp_rank + 1]:
                    publisher.limit_replays(body.truncate_replays)
        match body.action:
            case "crash":
                await self.pod.crash()
            case "start" if not self.pod.is_up:
                await self.pod.start()
            case "restart_in_place" if self.pod.is_up:
                self.pod.restart_in_place()
        return await self.read_faults(request)

    # -- inside

    def _guarded(self, handler: Handler) -> Handler:
        """Nothing answers for a pod that is down."""

        async def guarded(request: Request) -> Response:
            if not self.pod.is_up:
                raise Unresponsive(f"pod {self.pod.settings.name!r} is down")
            return await handler(request)

        return _answering(guarded)


def _prompt(pod: Pod, body: Common, token_ids: list[int], max_tokens: int | None) -> Prompt:
    return Prompt(
        token_ids=token_ids,
        max_tokens=max_tokens if max_tokens is not None else DEFAULT_MAX_TOKENS,
        salt=body.cache_salt or None,
        lora=_adapter(pod, body.model),
        full_report=body.vllm_xargs is not None and body.vllm_xargs.kv_cache_report_mode == "full",
    )


def _adapter(pod: Pod, model: str | None) -> str | None:
    """The LoRA adapter that a request's `model` names; None for the base model."""
    if model is None or model == pod.settings.model:
        return None
    if model in pod.settings.adapters:
        return model
    raise UnknownModel(f"The model `{model}` does not exist.")


def _dp_rank(request: Request) -> int | None:
    rank = request.headers.get("X-data-parallel-rank")
    if rank is not None and not rank.isdecimal():
        raise InvalidInput("X-data-parallel-rank is a number", field="X-data-parallel-rank")
    return int(rank) if rank is not None else None


async def _read(request: Request, kind: type[Body]) -> Body:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise LimitExceeded(f"a body has at most {BODY_BYTES_MAX} bytes", bound="BODY_BYTES_MAX")
    try:
        return msgspec.json.decode(body, type=kind)
    except UNDECODABLE as error:
        raise InvalidInput(str(error)) from error


def _answering(handler: Handler) -> Handler:
    """Turns what is refused into OpenAI's error bodies."""

    async def answering(request: Request) -> Response:
        try:
            return await handler(request)
        except IndexerError as error:
            status, kind = _status(error)
            return json_response(error_body(str(error), kind, status), status)
        except ClientDisconnect:
            return Response(
                status_code=CLIENT_CLOSED_REQUEST
            )  # nobody reads it; only the log of requests does

    return answering


def _status(error: IndexerError) -> tuple[int, str]:
    match error:
        case UnknownModel():
            return 404, "NotFoundError"
        case Overloaded() | Unresponsive():
            return 503, "ServiceUnavailableError"
        case _:
            return 400, "BadRequestError"
