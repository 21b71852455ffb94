"""The pods: who they are, how far each rank's picture can be trusted, and what to forget of them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import TypeAdapter, ValidationError

from app.api import bodies
from app.api.document import PROBLEMS, described
from app.api.wiring import Wiring, wiring_of
from app.endpoints import check_metrics_url, rank_endpoints
from app.errors import InvalidInput
from app.events import Tier
from app.observability.redaction import redacted
from app.pods import Pod, PodSpec, Source
from app.schemas.fields import Name
from app.schemas.pods import PodRequest, PodResponse, PodsResponse, RemovedResponse, RemoveFields

_name: TypeAdapter[str] = TypeAdapter(Name)

router = APIRouter(prefix="/v1/pods", tags=["pods"])


# A pod may be named by its URL, so a name can have slashes in it: the longer route stands first.
@router.delete("/{pod:path}/blocks", **described(RemovedResponse, query=RemoveFields))
async def remove_blocks(pod: str, request: Request) -> Response:
    """Forgets the blocks of a pod, or those of an adapter, a rank, a tier of it; the pod stays."""
    wiring = wiring_of(request)
    fields = bodies.validate_query(RemoveFields, request)
    removed = await wiring.writer.remove_blocks(
        pod,
        model=fields.model,
        lora=fields.lora,
        dp_rank=fields.dp_rank,
        tier=None if fields.tier is None else Tier[fields.tier.upper()],
    )
    return bodies.answer(request, {"removed_blocks": removed})


@router.get("", **described(PodsResponse))
async def list_pods(request: Request) -> Response:
    """Every registered pod, by name."""
    bodies.refuse_query(request)
    wiring = wiring_of(request)
    pods = sorted(wiring.service.pods.values(), key=lambda pod: pod.spec.name)
    return bodies.answer(request, {"pods": [_shown(wiring, pod) for pod in pods]})


@router.get("/{pod:path}", **described(PodResponse))
async def get_pod(pod: str, request: Request) -> Response:
    """One pod with the state of each rank."""
    bodies.refuse_query(request)
    wiring = wiring_of(request)
    return bodies.answer(request, _shown(wiring, wiring.service.pod(pod)))


@router.put("/{pod:path}", **described(PodResponse, body=PodRequest))
async def put_pod(pod: str, request: Request) -> Response:
    """Registers a pod. The same again changes nothing; another model or endpoint starts it empty."""
    wiring = wiring_of(request)
    notation = bodies.content_type(request, bodies.JSON, bodies.MSGPACK)
    bodies.refuse_query(request)
    body = await bodies.read_body(request, wiring.settings.body_bytes_max)
    fields = bodies.validate(PodRequest, bodies.cut_fields(body, notation), notation)
    registered = await wiring.writer.register(_spec(pod, fields))
    return bodies.answer(request, _shown(wiring, registered))


@router.delete(
    "/{pod:path}",
    status_code=204,
    responses={204: {"description": "It is gone and holds nothing."}, "default": PROBLEMS},
)
async def delete_pod(pod: str, request: Request) -> Response:
    """Forgets a pod and all that it holds, and stops following it."""
    bodies.refuse_query(request)
    await wiring_of(request).writer.drop_pod(pod)
    return Response(status_code=204)


def _spec(name: str, said: PodRequest) -> PodSpec:
    try:
        _name.validate_python(name)
    except ValidationError as error:
        raise InvalidInput(
            f"{name!r} is not a name for a pod: {error.errors()[0]['msg']}", field="pod"
        ) from None
    if said.metrics_url is not None:
        check_metrics_url(said.metrics_url)
    if said.zmq_endpoint is not None:
        rank_endpoints(said.zmq_endpoint, said.replay_endpoint, said.dp_size)
    elif said.replay_endpoint is not None:
        raise InvalidInput("a replay_endpoint is of no use without a zmq_endpoint", field="replay_endpoint")
    return PodSpec(name=name, **{**said.model_dump(), "lora": said.lora or None})


def _shown(wiring: Wiring, pod: Pod) -> dict[str, Any]:
    spec = pod.spec
    return {
        "pod": spec.name,
        "model": spec.model,
        "lora": spec.lora,
        "block_size": _block_size(pod),
        "zmq_endpoint": spec.zmq_endpoint,
        "replay_endpoint": spec.replay_endpoint,
        "topic": spec.topic,
        "dp_size": spec.dp_size,
        "metrics_url": None if spec.metrics_url is None else redacted(spec.metrics_url),
        "discovered_by": spec.discovered_by,
        "ranks": [_shown_rank(wiring, source) for _, source in sorted(pod.sources.items())],
    }


def _block_size(pod: Pod) -> int | None:
    """What was declared, or what its ranks have shown where they agree."""
    shown = {source.block_size for source in pod.sources.values()} - {None}
    return pod.spec.block_size or (shown.pop() if len(shown) == 1 else None)


def _shown_rank(wiring: Wiring, source: Source) -> dict[str, Any]:
    age_s = None if source.last_event_at_s is None else max(0.0, wiring.clock() - source.last_event_at_s)
    return {
        "dp_rank": source.dp_rank,
        "state": source.state,
        "cause": source.cause,
        "last_seq": source.last_seq,
        "last_event_age_s": age_s,
        "blocks": wiring.service.blocks_by_tier(source.pod, source.dp_rank),
        "gaps": source.gaps,
        "replays": source.replays,
        "restarts": source.restarts,
        "orphans": source.orphans,
        "rejected": source.rejected,
    }
