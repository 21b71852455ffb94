"""Asks a vLLM engine where it publishes, for which ranks, what model it serves, and in blocks of what size.

    GET /kv_event_sources   (vLLM 0.32 on) {"0": {"endpoint": "tcp://*:5557", "replay_endpoint": ..., "topic": ...}, ...}
    GET /metrics            `model_name` of its gauges of requests; `block_size` of vllm:cache_config_info

An endpoint is what the engine binds: `*` stands for the address at which it was asked. Refused, with a sentence: an
engine without events, or one that publishes by connecting to somebody else (there is nothing to connect to), ranks
that do not stand at consecutive ports from rank 0 on (a PodSpec cannot say it), a page without exactly one
model. A replay socket that is bound elsewhere (its own loopback, as in many examples) is left out: nobody else
reaches it, and no engine sends us to another machine.

A block size is taken over only if everything on the page that states one agrees: with a wrong one every event would be
rejected, while without one it is learned from the first event.
"""

from __future__ import annotations

import dataclasses
import re

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from app.bounded_read import get_at_most
from app.discovery.sightings import Sighting
from app.endpoints import Endpoint, parse_endpoint, rank_endpoints
from app.errors import UNDECODABLE, InvalidInput, Unresponsive
from app.pods import PodSpec
from app.schemas.fields import NAME_CHARS_MAX

TIMEOUT_S = 3.0
SOURCES_BYTES_MAX = 1024 * 1024

_LINES = re.compile(
    rb"^(?:# TYPE )?vllm:(?:num_requests_running|cache_config_info)[ {].*$",
    re.MULTILINE,
)
_NAME = re.compile(rf"[^\x00-\x1f\x7f]{{1,{NAME_CHARS_MAX}}}")
_BLOCK_SIZES = ("block_size", "effective_attention_block_size", "hash_block_size")


class _RankSource(msgspec.Struct, frozen=True):
    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""


_sources_decoder = msgspec.json.Decoder(dict[str, _RankSource])


@dataclasses.dataclass(frozen=True, slots=True)
class Learned:
    """`notes` are for the log: what was left out, and why."""

    spec: PodSpec
    notes: tuple[str, ...] = ()


async def learn(client: httpx.AsyncClient, sighting: Sighting, *, metrics_bytes_max: int) -> Learned:
    """Raises Unresponsive when the engine does not answer as one, InvalidInput for what cannot be followed."""
    assert sighting.url is not None, "an engine of which all is said is not asked"
    sources = await _get(client, f"{sighting.url}/kv_event_sources", SOURCES_BYTES_MAX)
    page = await _get(client, f"{sighting.url}/metrics", metrics_bytes_max)
    return read_answers(sighting, sources, page)


def read_answers(sighting: Sighting, sources: bytes, page: bytes) -> Learned:
    """The spec that the two answers amount to. Raises InvalidInput."""
    said = sighting.said
    publisher, replay, topic, dp_size, notes = _read_sources(sighting, sources)
    model, block_size = _read_page(page)
    if said.model is None and model is None:
        raise InvalidInput("its metrics name no model, or several: say model=", field="model")
    for field, value in (("model", said.model or model), ("topic", topic)):
        if value and not _NAME.fullmatch(value):
            raise InvalidInput(f"its {field} is none: {value[:64]!r}", field=field)
    spec = PodSpec(
        sighting.name,
        model=said.model or model or "",
        lora=said.lora,
        block_size=said.block_size or block_size,
        zmq_endpoint=str(publisher),
        replay_endpoint=None if replay is None else str(replay),
        topic=topic,
        dp_size=dp_size,
        metrics_url=f"{sighting.url}/metrics",
    )
    rank_endpoints(str(publisher), spec.replay_endpoint, dp_size)
    return Learned(spec, notes)


def _read_sources(
    sighting: Sighting, answer: bytes
) -> tuple[Endpoint, Endpoint | None, str, int, tuple[str, ...]]:
    """(publisher and replay of rank 0, topic, ranks, notes)."""
    try:
        told = _sources_decoder.decode(answer)
    except UNDECODABLE as error:
        raise InvalidInput(f"/kv_event_sources is not what an engine answers: {error}") from error
    ranks = {int(key): source for key, source in told.items() if key.isascii() and key.isdigit()}
    if len(ranks) != len(told) or sorted(ranks) != list(range(len(told))) or not ranks:
        raise InvalidInput(f"it has the ranks {', '.join(sorted(told)) or 'none'}, not those from 0 on")
    for dp_rank, source in ranks.items():
        if not source.enable_kv_cache_events or source.publisher != "zmq" or source.endpoint is None:
            raise InvalidInput(f"its rank {dp_rank} does not publish KV events over ZMQ")
    topics = {source.topic for source in ranks.values()}
    if len(topics) != 1:
        raise InvalidInput("its ranks publish under different topics")
    publisher = _first([source.endpoint or "" for _, source in sorted(ranks.items())], "endpoint")
    if not publisher.binds and publisher.host != sighting.host:
        raise InvalidInput(f"it connects to {publisher} to publish, so there is nothing to connect to")
    replays = [source.replay_endpoint for _, source in sorted(ranks.items())]
    notes: tuple[str, ...] = ()
    replay = None
    if all(replays):
        replay = _first([endpoint or "" for endpoint in replays], "replay_endpoint")
        if replay.binds or replay.host == sighting.host:
            replay = Endpoint(sighting.host, replay.port)
        else:
            notes = (f"its replay endpoint {replay} is not bound to {sighting.host}: lost batches stay lost",)
            replay = None
    else:
        notes = ("it has no replay endpoint: lost batches stay lost",)
    return Endpoint(sighting.host, publisher.port), replay, topics.pop(), len(ranks), notes


def _first(endpoints: list[str], field: str) -> Endpoint:
    """That of rank 0, where the others are at the ports behind it, or all tell the same (then it is the base)."""
    parsed = [parse_endpoint(endpoint, field=field) for endpoint in endpoints]
    base = parsed[0]
    if any(place != base for place in parsed) and any(
        place != base.at_rank(dp_rank) for dp_rank, place in enumerate(parsed)
    ):
        raise InvalidInput(
            f"the {field}s of its ranks are not at consecutive ports from {base} on", field=field
        )
    return base


def _read_page(page: bytes) -> tuple[str | None, int | None]:
    """(model, block size); None for what the page does not say, or not with one voice."""
    models: set[str] = set()
    sizes: set[str] = set()
    try:
        text = b"\n".join([*_LINES.findall(page), b""]).decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                models |= {sample.labels["model_name"]} if "model_name" in sample.labels else set()
                sizes |= {sample.labels[label] for label in _BLOCK_SIZES if label in sample.labels}
    except ValueError as error:
        raise InvalidInput(f"/metrics is not Prometheus' text: {error}") from error
    sizes -= {"None", ""}
    model = models.pop() if len(models) == 1 else None
    size = sizes.pop() if len(sizes) == 1 else ""
    fits = size.isascii() and size.isdigit() and len(size) < 6 and int(size) > 0
    return model or None, int(size) if fits else None


async def _get(client: httpx.AsyncClient, url: str, bytes_max: int) -> bytes:
    try:
        return await _read(client, url, bytes_max)
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        hint = ": it is older than vLLM 0.32, so say zmq_port= and model=" if status == 404 else ""
        raise Unresponsive(f"{url} answered {status}{hint}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unresponsive(f"{url} does not answer: {error or type(error).__name__}") from error


async def _read(client: httpx.AsyncClient, url: str, bytes_max: int) -> bytes:
    body = await get_at_most(client, url, bytes_max)
    if body is None:
        raise InvalidInput(f"{url} answered with more than {bytes_max} bytes")
    return body
