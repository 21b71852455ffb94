"""What a place reports about its pods, and what a setting says in place of engines that cannot be asked.

A place (the pods file, a DNS name, the Kubernetes API) gives pictures: every pod that it sees now, by name. A
sighting has either a whole spec, or an address at which the engine is asked (app/discovery/engine.py). Its
incarnation tells two engines of one name apart: another one is another engine, which starts empty.

Notation of what is said beside a DNS name, or of the pods of Kubernetes: `key=value` separated by commas.

    port=8000,model=llama-3             ask the engine at port 8000, but take this for its model
    zmq_port=5557,replay_port=6557,model=llama-3,dp_size=2,block_size=16
                                        an engine without `GET /kv_event_sources`: all is said, nothing is asked
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Protocol

from app.endpoints import PORT_MAX, rank_endpoints
from app.errors import InvalidInput
from app.pods import PodSpec

ENGINE_PORT = 8_000  # vLLM's own default
_NUMBERS = frozenset({"port", "zmq_port", "replay_port", "block_size", "dp_size"})
_WORDS = frozenset({"model", "lora", "topic"})


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """What the operator says of all engines of a place; what is None is learned from each engine."""

    port: int | None = None
    model: str | None = None
    lora: str | None = None
    block_size: int | None = None
    zmq_port: int | None = None
    replay_port: int | None = None
    topic: str = ""
    dp_size: int = 1

    @property
    def asks(self) -> bool:
        """Whether the engines are asked at all."""
        return self.zmq_port is None

    @property
    def engine_port(self) -> int | None:
        return self.port or (ENGINE_PORT if self.asks else None)


@dataclasses.dataclass(frozen=True, slots=True)
class Sighting:
    """A pod as its place sees it. Equal sightings are the same engine, unchanged.

    `url` is None where `spec` says everything. `host` is an address; one of IPv6 has its brackets.
    """

    name: str
    incarnation: str
    spec: PodSpec | None = None
    host: str = ""
    url: str | None = None
    said: Said = Said()


class Report(Protocol):
    """Where a place tells what it sees; made and called on the event loop."""

    def seen(self, picture: Mapping[str, Sighting], *, deleted: Collection[str] = ()) -> None:
        """Every pod that is there now. Those in `deleted` are gone for certain; others that lack have a deadline."""

    def failed(self, cause: str) -> None:
        """It could not be looked; the picture stays as it was."""


class Place(Protocol):
    """`name` identifies it in logs, metrics and snapshots: stable from one process to the next."""

    @property
    def name(self) -> str: ...
    async def watch(self, report: Report) -> None:
        """Looks for as long as it is not cancelled."""


def parse_said(text: str, *, place: str) -> Said:
    """Raises InvalidInput that names `place`, the key and the fault."""
    values: dict[str, int | str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if key not in _NUMBERS | _WORDS:
            known = ", ".join(sorted(_NUMBERS | _WORDS))
            raise InvalidInput(f"{place}: {key!r} is none of {known}", field=key)
        if key in values:
            raise InvalidInput(f"{place}: {key} is there twice", field=key)
        if not separator or not value:
            raise InvalidInput(f"{place}: {key} has no value", field=key)
        values[key] = _number(place, key, value) if key in _NUMBERS else value
    said = Said(**values)  # type: ignore[arg-type]
    if said.asks and {"replay_port", "topic", "dp_size"} & values.keys():
        raise InvalidInput(f"{place}: without zmq_port the engine is asked for its ports, topic and ranks")
    if not said.asks:
        if said.model is None:
            raise InvalidInput(f"{place}: with zmq_port the engine is not asked, so model must be said")
        spec = said_spec("pod", "host", said)
        rank_endpoints(spec.zmq_endpoint or "", spec.replay_endpoint, spec.dp_size)
    return said


def said_spec(name: str, host: str, said: Said) -> PodSpec:
    """Of a pod whose engine is not asked."""
    assert said.model is not None, "checked when it was parsed"
    return PodSpec(
        name,
        model=said.model,
        lora=said.lora,
        block_size=said.block_size,
        zmq_endpoint=f"tcp://{host}:{said.zmq_port}",
        replay_endpoint=None if said.replay_port is None else f"tcp://{host}:{said.replay_port}",
        topic=said.topic,
        dp_size=said.dp_size,
        metrics_url=None if said.port is None else f"http://{host}:{said.port}/metrics",
    )


def sight(name: str, incarnation: str, address: str, said: Said, *, port: int | None = None) -> Sighting:
    """Of the engine at an IP address; `port`, where given, is its HTTP port whatever is said."""
    host = f"[{address}]" if ":" in address else address
    if not said.asks:
        return Sighting(name, incarnation, spec=said_spec(name, host, said), host=host, said=said)
    return Sighting(name, incarnation, host=host, url=f"http://{host}:{port or said.engine_port}", said=said)


def _number(place: str, key: str, value: str) -> int:
    most = PORT_MAX if key.endswith("port") else 65_536
    if not (value.isascii() and value.isdigit()) or len(value) > 9 or not 1 <= int(value) <= most:
        raise InvalidInput(f"{place}: {key}={value} is not a whole number in 1..{most}", field=key)
    return int(value)
