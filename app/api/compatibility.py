"""Registration as Mooncake's conductor and Dynamo's standalone indexer have it, for routers that exist today.

The words of those systems are translated at this edge (app/api/instances.py says how), and the service knows nothing of
them. Answers have the fields of both, so a client of either finds its own. docs/compatibility.md lists where this
service differs on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from app.api import bodies
from app.api.document import described
from app.api.instances import DEFAULT, Instance, Partition, instance_of, model_of
from app.api.wiring import Wiring, wiring_of
from app.endpoints import Endpoint, rank_endpoints
from app.errors import InvalidInput, UnknownPod
from app.pods import Pod, PodSpec, Source, SourceState
from app.schemas.compatibility import (
    GlobalViewResponse,
    PartitionFields,
    RegisterRequest,
    RegisterResponse,
    ServicesResponse,
    UnregisterRequest,
    UnregisterResponse,
    WorkerRow,
)

router = APIRouter(tags=["compatibility"])

Fields = TypeVar("Fields", bound=PartitionFields)

_WORKERS = described(WorkerRow)
_WORKERS["responses"][200]["model"] = list[WorkerRow]
_REGISTER = described(RegisterResponse, body=RegisterRequest)
_REGISTER["responses"][201] = {**_REGISTER["responses"][200], "description": "The same, in Dynamo's words."}


@router.post("/register", **_REGISTER)
async def register(request: Request) -> Response:
    """Follows the events of one rank of an instance. The same again changes nothing; another endpoint starts anew."""
    wiring = wiring_of(request)
    fields, _, _ = await read_fields(request, RegisterRequest)
    instance = _instance(fields, fields.instance_id, fields.dp_rank or 0)
    if (fields.type or "").lower() == "mooncake":
        raise InvalidInput(
            "a Mooncake store publishes no token ids, so what it holds cannot be matched", field="type"
        )
    _refuse_known_rank(wiring, instance)
    replay = fields.replay_endpoint or None
    rank_endpoints(fields.endpoint, replay, 1)
    await wiring.writer.register(
        PodSpec(
            instance.pod,
            partition_of(fields).key(required_model(fields)),
            lora=fields.lora_name or None,
            block_size=fields.block_size,
            zmq_endpoint=fields.endpoint,
            replay_endpoint=replay,
        )
    )
    told = {"instance_id": instance.public_id}
    if fields.model_name is not None:
        return answer(request, {"status": "ok", **told}, status=201)
    return answer(request, {"status": "registered successfully", **told})


@router.post("/unregister", **described(UnregisterResponse, body=UnregisterRequest))
async def unregister(request: Request) -> Response:
    """Forgets one rank of an instance, or all of them, with all that they held."""
    wiring = wiring_of(request)
    fields, _, _ = await read_fields(request, UnregisterRequest)
    asked = _instance(fields, fields.instance_id, fields.dp_rank or 0)
    partition = partition_of(fields)
    model = model_name(fields)
    gone = []
    for name, pod in list(wiring.service.pods.items()):
        instance = instance_of(name)
        if instance.id != asked.id or instance.partition != partition:
            continue
        if model is not None and pod.spec.model != partition.key(model):
            continue
        ranks = _ranks(pod)
        if fields.dp_rank is not None and fields.dp_rank not in ranks:
            continue
        if fields.dp_rank is not None and len(ranks) > 1:
            detail = f"pod {name!r} was registered with {len(ranks)} ranks as a whole: unregister it without dp_rank"
            raise InvalidInput(detail, field="dp_rank")
        gone.append(name)
    if not gone:
        raise UnknownPod(asked.pod)
    keys = []
    for name in gone:
        keys += [f"{asked.id}|{partition.tenant}|{rank}" for rank in _ranks(wiring.service.pod(name))]
        await wiring.writer.drop_pod(name)
    status = "ok" if fields.model_name is not None else "unregistered successfully"
    return answer(request, {"status": status, "removed_instances": sorted(keys)})


@router.get("/workers", **_WORKERS)
async def workers(request: Request) -> Response:
    """Every instance with its ranks, as Dynamo's indexer lists them."""
    rows: dict[tuple[Instance, str], dict[str, Any]] = {}
    for instance, pod, source in _sources(wiring_of(request)):
        spec = pod.spec
        model, partition = model_of(spec.model)
        status = _status(source)
        row = rows.setdefault(
            (Instance(instance.id, instance.partition), model),
            {
                "instance_id": instance.public_id,
                "source": "http" if spec.zmq_endpoint is None else "zmq",
                "status": status,
                "model_name": model,
                "tenant_id": partition.tenant,
                "routing_group": partition.group,
                "block_size": source.block_size,
                "endpoints": {},
                "listeners": {},
            },
        )
        rank = str(instance.dp_rank + source.dp_rank)
        endpoint, _ = _endpoints(spec, source.dp_rank)
        if endpoint is not None:
            row["endpoints"][rank] = str(endpoint)
        row["listeners"][rank] = {"endpoint": str(endpoint or ""), "status": status, "state": source.state}
        row["status"] = min(row["status"], status)  # active, failed, pending: one that is active will do
    return answer(request, list(rows.values()))


@router.get("/services", **described(ServicesResponse))
async def services(request: Request) -> Response:
    """Every registered rank, as Mooncake's conductor lists them."""
    rows = []
    for instance, pod, source in _sources(wiring_of(request)):
        model, partition = model_of(pod.spec.model)
        endpoint, replay = _endpoints(pod.spec, source.dp_rank)
        rows.append(
            {
                "Endpoint": str(endpoint or ""),
                "ReplayEndpoint": str(replay or ""),
                "Type": "",
                "ModelName": model,
                "LoraName": pod.spec.lora or "",
                "TenantID": partition.tenant,
                "InstanceID": instance.id,
                "BlockSize": source.block_size,
                "DPRank": instance.dp_rank + source.dp_rank,
                "CacheGroup": None,
                "HashProfile": None,
            }
        )
    return answer(request, {"count": len(rows), "services": rows})


@router.get("/global_view", **described(GlobalViewResponse))
async def global_view(request: Request) -> Response:
    """Every context with the instances of its model, as Mooncake's conductor shows them."""
    wiring = wiring_of(request)
    instances: dict[str, dict[str, list[int]]] = {}
    for instance, pod, source in _sources(wiring):
        ranks = instances.setdefault(pod.spec.model, {}).setdefault(instance.id, [])
        ranks.append(instance.dp_rank + source.dp_rank)
    rows = []
    for context in wiring.service.stats()["contexts"]:
        model, partition = model_of(context["model"])
        rows.append(
            {
                "model_name": model,
                "lora_name": context["lora"] or "",
                "block_size": context["block_size"],
                "tenant_id": partition.tenant,
                "prefix_count": context["prefixes"],
                "hash_profile": None,
                "instances": instances.get(context["model"], {}),
            }
        )
    return answer(request, {"context_count": len(rows), "contexts": rows})


# -- shared with compatible_queries


async def read_fields(
    request: Request, model: type[Fields], *arrays: str
) -> tuple[Fields, bodies.Fields, str]:
    """The validated fields, all raw fields and the notation; query parameters are ignored like unknown fields."""
    notation = bodies.content_type(request, bodies.JSON, bodies.MSGPACK)
    body = await bodies.read_body(request, wiring_of(request).settings.body_bytes_max)
    raw = bodies.cut_fields(body, notation)
    return bodies.validate(model, raw, notation, beside=arrays), raw, notation


def partition_of(fields: PartitionFields) -> Partition:
    return Partition(fields.tenant_id or DEFAULT, fields.routing_group or DEFAULT)


def model_name(fields: PartitionFields) -> str | None:
    """The one model that is named, in whichever spelling. Raises InvalidInput for two different ones."""
    named = {fields.model_name, fields.modelname, fields.model} - {None}
    if len(named) > 1:
        raise InvalidInput("model_name, modelname and model name different models", field="model_name")
    return named.pop() if named else None


def required_model(fields: PartitionFields) -> str:
    model = model_name(fields)
    if model is None:
        raise InvalidInput("model_name (or modelname, or model) is needed", field="model_name")
    return model


def answer(request: Request, content: Any, *, status: int = 200) -> Response:
    """In the notation of the request where it does not prefer one: Mooncake's clients speak msgpack both ways."""
    sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if sent.endswith("msgpack") and request.headers.get("accept", "*/*") == "*/*":
        return Response(msgspec.msgpack.encode(content), status, media_type=bodies.MSGPACK)
    return bodies.answer(request, content, status)


# -- pods as instances


def _instance(fields: PartitionFields, instance_id: int | str, dp_rank: int) -> Instance:
    return Instance(str(instance_id), partition_of(fields), dp_rank)


def _refuse_known_rank(wiring: Wiring, instance: Instance) -> None:
    """A rank must not be there twice, once in a pod of all ranks and once on its own."""
    whole = wiring.service.pods.get(Instance(instance.id, instance.partition).pod)
    if instance.dp_rank and whole is not None and instance.dp_rank in _ranks(whole):
        detail = f"pod {whole.spec.name!r} has a rank {instance.dp_rank} already"
        raise InvalidInput(detail, field="dp_rank")


def _ranks(pod: Pod) -> list[int]:
    first = instance_of(pod.spec.name).dp_rank
    return sorted(first + rank for rank in pod.sources)


def _sources(wiring: Wiring) -> Iterator[tuple[Instance, Pod, Source]]:
    for name, pod in sorted(wiring.service.pods.items()):
        for _, source in sorted(pod.sources.items()):
            yield instance_of(name), pod, source


def _endpoints(spec: PodSpec, dp_rank: int) -> tuple[Endpoint | None, Endpoint | None]:
    if spec.zmq_endpoint is None or dp_rank >= spec.dp_size:
        return None, None
    return rank_endpoints(spec.zmq_endpoint, spec.replay_endpoint, spec.dp_size)[dp_rank]


def _status(source: Source) -> str:
    if source.stream is not SourceState.DOWN:
        return "active"
    return "pending" if source.last_event_at_s is None else "failed"
