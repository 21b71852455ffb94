"""Queries as Mooncake's conductor, Dynamo's standalone indexer and LMCache's controller take them.

Each is one match of the service (a lookup that names no model: one a model), told in tokens and in the words of the
asker. Tiers are cumulative from fast to slow, and `external` counts as disk, which those systems have no word beyond.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from app.api import bodies
from app.api.compatibility import answer, model_name, partition_of, read_fields, required_model
from app.api.document import described
from app.api.instances import Partition, instance_of, model_of
from app.api.wiring import Wiring, wiring_of
from app.errors import InvalidInput
from app.extra_keys import query_extra_keys
from app.schemas.compatibility import (
    LookupFields,
    LookupRequest,
    LookupResponse,
    QueryByHashRequest,
    QueryFields,
    QueryRequest,
    QueryResponse,
)
from app.service import MatchQuery, MatchResult
from app.service.scoring import TIER_LABELS

router = APIRouter(tags=["compatibility"])

LOOKUP_MODELS_MAX = 64  # that a lookup without a model goes through

_MSGPACK_BINARY = frozenset({0xC4, 0xC5, 0xC6})


@router.post("/query", **described(QueryResponse, body=QueryRequest))
async def query(request: Request) -> Response:
    """How many tokens of a prompt each instance holds, by rank and by tier."""
    wiring = wiring_of(request)
    fields, raw, notation = await read_fields(request, QueryFields, "token_ids")
    token_ids = _token_ids(wiring, raw, notation, "token_ids")
    partition = partition_of(fields)
    lora = fields.lora_name or None
    result = _match(
        wiring,
        MatchQuery(
            model=partition.key(required_model(fields)),
            lora=lora,
            token_ids=token_ids,
            extra_keys=query_extra_keys(None, lora=lora, cache_salt=fields.cache_salt or None),
        ),
    )
    return answer(request, _shown(result, partition, fields.instance_id))


@router.post("/query_by_hash", **described(QueryResponse, body=QueryByHashRequest))
async def query_by_hash(request: Request) -> Response:
    """The same for prefix hashes of this service: those of other systems are unknown here and match nothing."""
    wiring = wiring_of(request)
    fields, raw, notation = await read_fields(request, QueryFields, "block_hashes", "seq_hashes")
    given = {
        name: hashes
        for name in ("block_hashes", "seq_hashes")
        if (hashes := bodies.signed_hashes(raw, notation, wiring.settings.tokens_max, name=name)) is not None
    }
    if len(given) != 1:
        raise InvalidInput("exactly one of block_hashes and seq_hashes is needed", field="block_hashes")
    partition = partition_of(fields)
    result = _match(
        wiring,
        MatchQuery(
            model=partition.key(required_model(fields)),
            lora=fields.lora_name or None,
            prefix_hashes=next(iter(given.values())),
            block_size=fields.block_size,
        ),
    )
    return answer(request, _shown(result, partition, fields.instance_id))


@router.post("/lookup", **described(LookupResponse, body=LookupRequest))
async def lookup(request: Request) -> Response:
    """Which instance has the longest leading part of these tokens, and on which tier?

    LMCache names no model: every model of the tenant is asked, unless one is named here.
    """
    wiring = wiring_of(request)
    fields, raw, notation = await read_fields(request, LookupFields, "tokens")
    token_ids = _token_ids(wiring, raw, notation, "tokens")
    found: dict[str, tuple[str, int]] = {}
    for model, lora in _models(wiring, fields):
        keys = query_extra_keys(None, lora=lora, cache_salt=fields.cache_salt or None)
        result = _match(wiring, MatchQuery(model=model, lora=lora, token_ids=token_ids, extra_keys=keys))
        for row in result.matches:
            instance = instance_of(row.pod).id
            if row.matched_tokens > found.get(instance, ("", 0))[1]:
                tier = next(label for label in TIER_LABELS if row.tiers[label] == row.matched_blocks)
                found[instance] = (tier, row.matched_tokens)
    layout = dict(sorted(found.items(), key=lambda item: (-item[1][1], item[0])))
    return answer(request, {"event_id": f"Lookup{uuid.uuid4()}", "layout_info": layout})


def _models(wiring: Wiring, fields: LookupFields) -> list[tuple[str, str | None]]:
    """The models and adapters that a lookup asks for."""
    partition = partition_of(fields)
    model = model_name(fields)
    if model is not None:
        return [(partition.key(model), fields.lora_name or None)]
    served = {
        (pod.spec.model, fields.lora_name or pod.spec.lora)
        for pod in wiring.service.pods.values()
        if model_of(pod.spec.model)[1] == partition
    }
    if len(served) > LOOKUP_MODELS_MAX:
        raise InvalidInput(f"more than {LOOKUP_MODELS_MAX} models are served here: name one", field="model")
    return sorted(served, key=lambda pair: (pair[0], pair[1] or ""))


def _token_ids(wiring: Wiring, raw: bodies.Fields, notation: str, name: str) -> bytes:
    """As uint32, little-endian: an array, or in msgpack those bytes themselves, as Mooncake's clients send them."""
    tokens_max = wiring.settings.tokens_max
    if notation == bodies.MSGPACK and name in raw and memoryview(raw[name])[0] in _MSGPACK_BINARY:
        return bodies.octet_token_ids(msgspec.msgpack.decode(raw[name], type=bytes), tokens_max)
    token_ids = bodies.token_ids(raw, notation, tokens_max, name=name)
    if token_ids is None:
        raise InvalidInput(f"{name} is needed", field=name)
    return token_ids


def _match(wiring: Wiring, asked: MatchQuery) -> MatchResult:
    result = wiring.service.match(asked)
    wiring.metrics.observe_match(result.matches[0].matched_blocks if result.matches else 0)
    return result


def _shown(result: MatchResult, partition: Partition, only: int | str | None) -> dict[str, Any]:
    scores: dict[str, dict[str, int]] = {}
    instances: dict[str, dict[str, Any]] = {}
    for row in result.matches:
        instance = instance_of(row.pod)
        if (
            not row.matched_blocks
            or instance.partition != partition
            or only not in (None, instance.id, instance.public_id)
        ):
            continue
        rank = str(instance.dp_rank + row.dp_rank)
        gpu = row.tiers["gpu"] * result.block_size
        depths = {
            "gpu": gpu,
            "cpu": row.tiers["cpu"] * result.block_size,
            "disk": row.tiers["external"] * result.block_size,
        }
        if gpu:
            scores.setdefault(instance.id, {})[rank] = gpu
        known = instances.setdefault(
            instance.id, {"longest_matched": 0, "gpu": 0, "cpu": 0, "disk": 0, "dp": {}, "rank_matches": {}}
        )
        for tier, tokens in depths.items():
            known[tier] = max(known[tier], tokens)
        known["longest_matched"] = known["disk"]
        known["dp"][rank] = gpu
        known["rank_matches"][rank] = depths
    return {"scores": scores, "frequencies": [], "instances": instances}
