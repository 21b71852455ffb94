"""Events in: JSON with an envelope, or exactly the payload that an engine publishes. When it is answered, a
match sees it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from app import hashing
from app.api import bodies
from app.api.document import described
from app.api.wiring import Wiring, wiring_of
from app.errors import BatchRejected, InvalidInput, LimitExceeded
from app.events import BlockRemoved, Envelope, EventBatch, PrefixesStored
from app.ingest.vllm import EventPost, decode_batch, decode_json_events
from app.schemas.events import EventsFields, EventsRequest, EventsResponse
from app.service import BatchResult, IndexerService
from app.service.writers import Writer

router = APIRouter(prefix="/v1", tags=["events"])


@router.post(
    "/events", **described(EventsResponse, body=EventsRequest, query=EventsFields, engine_payload=True)
)
async def events(request: Request) -> Response:
    """Applies one batch of one rank of a pod; an unknown pod is registered when the batch names its model.

    As `application/msgpack` the body is the payload frame that an engine publishes, of any vLLM or SGLang
    release, and the other fields are query parameters, which go before its own time and rank. An event that
    cannot be used is skipped and named in `rejected`; when none can be used, nothing changes and the answer is
    a 422 that names each fault.

    A JSON batch whose `pod` is null removes blocks from every pod of `model` that names them.
    """
    wiring = wiring_of(request)
    notation = bodies.content_type(request, bodies.JSON, bodies.MSGPACK)
    body = await bodies.read_body(request, wiring.settings.body_bytes_max)
    if notation == bodies.MSGPACK:
        fields, batch = _from_payload(request, wiring.service, body)
    else:
        bodies.refuse_query(request)
        fields, batch = _from_json(wiring, body)
    if fields.pod is None:
        _check_count(wiring, len(batch.events) + len(batch.rejected) + batch.ignored)
        return bodies.answer(request, _shown(await _remove_everywhere(wiring.writer, fields, batch)))
    envelope = Envelope(
        pod=fields.pod,
        model=fields.model,
        dp_rank=fields.dp_rank if "dp_rank" in fields.model_fields_set else batch.dp_rank or 0,
        seq=fields.seq,
        lora=fields.lora or None,
        digest=digest_of(fields.seq, body),
        incomplete=fields.incomplete,
        owner=fields.owner,
    )
    told = apply_batch(wiring, envelope, batch)
    return bodies.answer(request, told if isinstance(told, dict) else await told)


def digest_of(seq: int | None, body: bytes | memoryview) -> int | None:
    """Only what comes as number 0 is told apart by it."""
    return hashing.digest(bytes(body)) if seq == 0 else None


def apply_batch(
    wiring: Wiring, envelope: Envelope, batch: EventBatch
) -> dict[str, Any] | Awaitable[dict[str, Any]]:
    """What is answered, or in a replica what will be."""
    _check_count(wiring, len(batch.events) + len(batch.rejected) + batch.ignored)

    def told(result: BatchResult) -> dict[str, Any]:
        if batch.ts is not None and not result.duplicate:
            wiring.metrics.observe_lag(time.time() - batch.ts)
        return _shown(result)

    async def apply_through_log() -> dict[str, Any]:
        return told(await wiring.writer.post(envelope, batch))

    service = wiring.writer.immediate
    if service is None:
        return apply_through_log()

    def apply() -> dict[str, Any]:
        return told(service.post(envelope, batch))

    if any(isinstance(event, PrefixesStored) for event in batch.events):
        service.check(envelope, batch)
        return _behind(service.listing(), apply)
    return apply()


async def _behind(slices: Iterator[None], apply: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A dump asks for prefixes without their chains; others have their turn until the index can answer that."""
    for _ in slices:
        await asyncio.sleep(0)
    return apply()


async def _remove_everywhere(writer: Writer, fields: EventsFields, batch: EventBatch) -> BatchResult:
    """All of the batch or nothing: what has no pod has no counters to show what was left out."""
    said = fields.model_fields_set & {"seq", "dp_rank", "owner"}
    for name in sorted(said):
        raise InvalidInput(f"{name} is one pod's: leave it out where pod is null", field=name)
    if fields.model is None:
        raise InvalidInput("a batch for every pod must name their model", field="model")
    if batch.rejected:
        raise BatchRejected(batch.rejected)
    removals = tuple(event for event in batch.events if isinstance(event, BlockRemoved))
    if len(removals) < len(batch.events):
        raise InvalidInput("only BlockRemoved can be said of every pod", field="events")
    removed = await writer.remove_everywhere(fields.model, fields.lora or None, removals)
    accepted = len(removals) + batch.ignored
    return BatchResult(accepted=accepted, ignored=batch.ignored, removed_blocks=removed)


def _from_payload(request: Request, service: IndexerService, body: bytes) -> tuple[EventsFields, EventBatch]:
    fields = bodies.validate_query(EventsFields, request)
    dp_rank = fields.dp_rank if "dp_rank" in fields.model_fields_set else None
    batch = decode_payload(service, body, fields.pod, dp_rank)
    return fields, batch if fields.ts is None else msgspec.structs.replace(batch, ts=fields.ts)


def _from_json(wiring: Wiring, body: bytes) -> tuple[EventsFields, EventBatch]:
    raw = bodies.cut_fields(body, bodies.JSON)
    fields = bodies.validate(EventsFields, raw, bodies.JSON, beside=("events",))
    events = bodies.raw_list(
        raw, bodies.JSON, "events", count_max=wiring.settings.events_max, bound="events_max"
    )
    post = EventPost(
        pod=fields.pod or "",
        events=events,
        dp_rank=fields.dp_rank,
        model=fields.model,
        seq=fields.seq,
        ts=fields.ts,
    )
    size = known_block_size(wiring.service, fields.pod, fields.dp_rank)
    return fields, decode_json_events(post, block_size=size)


def decode_payload(
    service: IndexerService, body: bytes | memoryview, pod: str | None, dp_rank: int | None
) -> EventBatch:
    """By the block size of the rank that the sender named, else of the batch's own, which is known when it is read."""
    size = known_block_size(service, pod, dp_rank or 0)
    batch = decode_batch(body, block_size=size)
    if dp_rank is None and batch.dp_rank:
        own_size = known_block_size(service, pod, batch.dp_rank)
        if own_size != size:
            return decode_batch(body, block_size=own_size)
    return batch


def known_block_size(service: IndexerService, name: str | None, dp_rank: int) -> int | None:
    """What the pod is known to use; the codec knows partial blocks by it."""
    pod = service.pods.get(name) if name is not None else None
    if pod is None:
        return None
    source = pod.sources.get(dp_rank)
    return pod.spec.block_size if source is None else source.block_size


def _check_count(wiring: Wiring, count: int) -> None:
    events_max = wiring.settings.events_max
    if count > events_max:
        raise LimitExceeded(f"{count} events are more than events_max = {events_max}", bound="events_max")


def _shown(result: BatchResult) -> dict[str, Any]:
    return {
        "accepted": result.accepted,
        "stored_blocks": result.stored_blocks,
        "removed_blocks": result.removed_blocks,
        "orphans": result.orphans,
        "ignored": result.ignored,
        "rejected": [msgspec.structs.asdict(fault) for fault in result.rejected],
        "duplicate": result.duplicate,
    }
