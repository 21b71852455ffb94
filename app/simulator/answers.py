"""One inference request on its way through a pod: asked, measured, answered whole or as server-sent events.

The first step is waited for before anything is sent, so that what is refused is refused with a status. A
client that goes away from a stream aborts its request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import msgspec
from prometheus_client import Histogram
from starlette.responses import Response, StreamingResponse

from app.errors import Unresponsive
from app.simulator.bodies import Common, error_body, usage
from app.simulator.connector import BlockMetadata
from app.simulator.engine import Output, Prompt
from app.simulator.pod import Pod
from app.simulator.pod_metrics import PodMetrics
from app.simulator.words import Words


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerForm:
    """How a route writes text: `whole` in one answer, `part` in a stream."""

    kind: str
    chunk_kind: str
    whole: Callable[[str], dict[str, Any]]
    part: Callable[[str], dict[str, Any]]


COMPLETION = AnswerForm(
    "text_completion", "text_completion", whole=lambda text: {"text": text}, part=lambda text: {"text": text}
)
CHAT = AnswerForm(
    "chat.completion",
    "chat.completion.chunk",
    whole=lambda text: {"message": {"role": "assistant", "content": text}},
    part=lambda text: {"delta": {"role": "assistant", "content": text}},
)


class Answer:
    """Of one request; `respond` is called once."""

    def __init__(
        self, pod: Pod, metrics: PodMetrics, words: Words, body: Common, prompt: Prompt, dp_rank: int | None
    ) -> None:
        self._pod = pod
        self._metrics = metrics
        self._words = words
        self._body = body
        self._prompt = prompt
        self._dp_rank = dp_rank
        self._started_s = time.monotonic()

    async def respond(self, form: AnswerForm, identity: str) -> Response:
        outputs = self._pod.generate(self._prompt, dp_rank=self._dp_rank, hint=self._hint())
        first = await anext(outputs)
        self._observe(self._metrics.time_to_first_token)
        if self._body.stream:
            stream = self._stream(form, identity, first, outputs)
            return StreamingResponse(stream, media_type="text/event-stream")
        token_ids = list(first.token_ids)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                token_ids += output.token_ids
        self._observe(self._metrics.latency)
        choice = {"index": 0, **form.whole(self._words.decode(token_ids)), "finish_reason": "length"}
        if self._body.return_token_ids:
            choice |= {"token_ids": token_ids, "prompt_token_ids": list(self._prompt.token_ids)}
        counted = usage(len(self._prompt.token_ids), first.cached_tokens, len(token_ids))
        return json_response({**self._head(form.kind, identity), "choices": [choice], "usage": counted})

    async def _stream(
        self, form: AnswerForm, identity: str, first: Output, outputs: AsyncGenerator[Output, None]
    ) -> AsyncIterator[bytes]:
        head = self._head(form.chunk_kind, identity)
        completed = 0
        try:
            async with contextlib.aclosing(outputs):
                async for output in _chained(first, outputs):
                    completed += len(output.token_ids)
                    text = self._words.decode(output.token_ids) + ("" if output.finished else " ")
                    reason = "length" if output.finished else None
                    yield _event(
                        {**head, "choices": [{"index": 0, **form.part(text), "finish_reason": reason}]}
                    )
        except Unresponsive as error:
            # The status is long sent: the stream says what happened and ends without its mark.
            yield _event(error_body(str(error), "ServiceUnavailableError", 503))
            return
        self._observe(self._metrics.latency)
        options = self._body.stream_options
        if options is not None and options.include_usage:
            counted = usage(len(self._prompt.token_ids), first.cached_tokens, completed)
            yield _event({**head, "choices": [], "usage": counted})
        yield b"data: [DONE]\n\n"

    def _head(self, kind: str, identity: str) -> dict[str, Any]:
        model = self._body.model or self._pod.settings.model
        return {"id": identity, "object": kind, "created": int(time.time()), "model": model}

    def _hint(self) -> BlockMetadata | None:
        """What the request says about its prefix; what a router learned of it is kept for the load hook."""
        about = self._body.kv_transfer_params
        if about is None:
            return None
        hint = self._pod.ranks[0].connector.build_prefix_hint(
            self._prompt.token_ids,
            agent_id=about.agent_id,
            cla_group=about.cla_group,
            workflow_step=about.workflow_step,
            offset_hint=about.offset_hint,
        )
        if about.hints:
            for rank in self._pod.ranks:
                rank.hints.learn(hint.anchor_hash, about.hints)
        return hint

    def _observe(self, histogram: Histogram) -> None:
        if math.isinf(self._pod.settings.speed):
            return  # time does not pass here
        simulated_s = (time.monotonic() - self._started_s) * self._pod.settings.speed
        histogram.labels(str(self._dp_rank or 0), self._pod.settings.model).observe(simulated_s)


async def _chained(first: Output, rest: AsyncIterator[Output]) -> AsyncIterator[Output]:
    yield first
    async for output in rest:
        yield output


def _event(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def json_response(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
