"""What operators and their probes ask."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from app import __version__
from app.api import bodies, problems
from app.api.document import PROBLEMS, described
from app.api.wiring import wiring_of
from app.metrics.metrics import CONTENT_TYPE
from app.schemas.operations import HealthResponse, StatsResponse

router = APIRouter(tags=["operations"])


@router.get("/v1/stats", **described(StatsResponse))
async def stats(request: Request) -> Response:
    """Figures of the index, the sources and the queries since the start."""
    bodies.refuse_query(request)
    wiring = wiring_of(request)
    replication = {} if wiring.replication is None else {"replication": wiring.replication()}
    figures = {**wiring.service.stats(), "discovery": wiring.discovery(), **replication}
    return bodies.answer(request, figures)


@router.get("/healthz", **described(HealthResponse))
async def healthz(request: Request) -> Response:
    """The process answers."""
    return bodies.answer(request, {"status": "ok", "version": __version__})


@router.get("/readyz", **described(HealthResponse))
async def readyz(request: Request) -> Response:
    """503 with the reasons until every configured pod is connected, or its time of grace is over."""
    reasons = wiring_of(request).not_ready()
    if reasons:
        return problems.problem(503, "not-ready", problems.sentence(reasons), faults=reasons)
    return bodies.answer(request, {"status": "ok", "version": __version__})


@router.get(
    "/metrics",
    responses={
        200: {
            "description": "Prometheus text format.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
        "default": PROBLEMS,
    },
)
async def metrics(request: Request) -> Response:
    """Figures for Prometheus; docs/operations.md says what each is for."""
    return Response(wiring_of(request).metrics.exposition(), media_type=CONTENT_TYPE)
