"""A complete router in front of OpenAI-compatible pods: each prompt goes where most of it is cached already.

    python examples/router.py --indexer http://127.0.0.1:8080 --port 8000 \
        --pod pod-0=http://127.0.0.1:9000 --pod pod-1=http://127.0.0.1:9001

Pods are named as the indexer knows them; `x-pod` of an answer says where it came from. A pod's own `/tokenize` makes
the token ids, so no tokenizer is needed here. Whatever fails on the way to a choice, the request is sent all the same,
to the pods in turn; a pod that cannot be reached is passed over.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from app.client import AsyncClient, Load, Prompt
from app.errors import IndexerError

TRACED = (
    "x-request-id",
    "traceparent",
    "tracestate",
)  # of the request, for the indexer's log lines and spans
HOP_BY_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})


class Router:
    """`pods` are base URLs by name, `model` is what the indexer calls the model of these pods."""

    def __init__(
        self, ask: AsyncClient, http: httpx.AsyncClient, pods: Mapping[str, str], model: str
    ) -> None:
        self._client = ask
        self._http = http
        self._pods = pods
        self._model = model
        self._turns = itertools.cycle(pods)  # of requests without a choice
        self._tokenizers = itertools.cycle(pods)
        self._running: Counter[str] = Counter()

    async def complete(self, request: Request) -> Response:
        content = await request.body()
        try:
            body = json.loads(content)
        except ValueError:
            return _problem(400, "the body is not JSON")
        headers = {name: value for name, value in request.headers.items() if name not in HOP_BY_HOP}
        chosen, dp_rank = await self._choose(body if isinstance(body, dict) else {}, headers)
        for pod in dict.fromkeys([chosen, *itertools.islice(self._turns, len(self._pods))]):
            rank = {"x-data-parallel-rank": str(dp_rank)} if pod == chosen and dp_rank is not None else {}
            url = self._pods[pod] + request.url.path
            asked = self._http.build_request("POST", url, content=content, headers=headers | rank)
            self._running[pod] += 1
            try:
                answer = await self._http.send(asked, stream=True)
            except httpx.TransportError:
                self._running[pod] -= 1
                continue
            told = {name: value for name, value in answer.headers.items() if name not in HOP_BY_HOP}
            return StreamingResponse(self._passed(pod, answer), answer.status_code, told | {"x-pod": pod})
        return _problem(503, "no pod can be reached")

    async def models(self, _request: Request) -> Response:
        answer = await self._http.get(next(iter(self._pods.values())) + "/v1/models")
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    async def _choose(self, body: dict[str, Any], headers: Mapping[str, str]) -> tuple[str, int | None]:
        """A pod, and its rank where the indexer has chosen one."""
        token_ids = await self._token_ids(body)
        if token_ids:
            adapter = body.get("model", self._model)
            prompt = Prompt(
                model=self._model,
                lora=None if adapter == self._model else adapter,
                cache_salt=body.get("cache_salt"),
                token_ids=token_ids,
            )
            loads = {pod: Load(running=self._running[pod]) for pod in self._pods}
            traced = {name: headers[name] for name in TRACED if name in headers}
            with contextlib.suppress(IndexerError):  # what the indexer refuses is the pod's to judge
                answer = await self._client.route(prompt, pods=list(self._pods), loads=loads, headers=traced)
                if answer.pod is not None and answer.pod in self._pods:
                    return answer.pod, answer.dp_rank
        return next(self._turns), None

    async def _token_ids(self, body: dict[str, Any]) -> list[int]:
        """[] when they cannot be had."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return prompt
        asked = {name: body[name] for name in ("model", "prompt", "messages", "tools") if name in body}
        url = self._pods[next(self._tokenizers)] + "/tokenize"
        try:
            answer = await self._http.post(url, json=asked, timeout=1.0)
            return list(answer.json()["tokens"]) if answer.is_success else []
        except (httpx.HTTPError, ValueError, KeyError):
            return []

    async def _passed(self, pod: str, answer: httpx.Response) -> AsyncIterator[bytes]:
        try:
            async for chunk in answer.aiter_raw():
                yield chunk
        finally:
            self._running[pod] -= 1
            await answer.aclose()


def create_app(indexer: str, pods: Mapping[str, str], model: str, *, api_key: str | None = None) -> Starlette:
    unlimited = httpx.Limits(max_connections=None)
    http = httpx.AsyncClient(timeout=httpx.Timeout(600.0, connect=2.0), limits=unlimited)
    client = AsyncClient(indexer, api_key=api_key)
    router = Router(client, http, pods, model)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with client, http:
            yield

    routes = [
        Route("/v1/completions", router.complete, methods=["POST"]),
        Route("/v1/chat/completions", router.complete, methods=["POST"]),
        Route("/v1/models", router.models),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def _problem(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "router_error", "code": status}}, status)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--indexer", default="http://127.0.0.1:8080")
    parser.add_argument("--model", default="simulated")
    parser.add_argument("--pod", action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--port", type=int, default=8_000)
    arguments = parser.parse_args()
    pods = dict(pod.split("=", 1) for pod in arguments.pod)
    app = create_app(arguments.indexer, pods, arguments.model, api_key=os.environ.get("KVINDEXER_API_KEY"))
    uvicorn.run(app, port=arguments.port)


if __name__ == "__main__":
    main()
