"""Pods from what people write: a request body, an option, a line of a file. One set of rules for the three.

    name=tcp://host:5557,model=m,replay=tcp://host:5558,block_size=16,dp_size=2,lora=a,topic=t
    name,model=m                                          a pod whose events come by HTTP

The words are those of `PUT /v1/pods/{pod}`, with `replay` for `replay_endpoint`. A comma ends a value.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from app.endpoints import rank_endpoints
from app.errors import InvalidInput, InvalidSettings
from app.pods import PodSpec
from app.schemas import Name, PodRequest

_FILE_BYTES_MAX = 16 * 1024 * 1024
_name = TypeAdapter(Name)


def pod_spec(name: str, request: PodRequest) -> PodSpec:
    """Raises InvalidInput for a name or endpoints that cannot be."""
    try:
        _name.validate_python(name)
    except ValidationError as error:
        raise InvalidInput(
            f"{name!r} is not a name for a pod: {error.errors()[0]['msg']}", field="pod"
        ) from None
    if request.zmq_endpoint is not None:
        rank_endpoints(request.zmq_endpoint, request.replay_endpoint, request.dp_size)
    elif request.replay_endpoint is not None:
        raise InvalidInput("a replay_endpoint is of no use without a zmq_endpoint", field="replay_endpoint")
    return PodSpec(
        name=name,
        model=request.model,
        lora=request.lora or None,
        block_size=request.block_size,
        zmq_endpoint=request.zmq_endpoint,
        replay_endpoint=request.replay_endpoint,
        topic=request.topic,
        dp_size=request.dp_size,
    )


def configured_pods(texts: Iterable[str], file: Path | None) -> tuple[PodSpec, ...]:
    """The pods of the settings `pods` and `pods_file`. Raises InvalidSettings."""
    specs = [_parse(text, f"pod {text!r}") for text in texts]
    if file is not None:
        specs += [
            _parse(line.strip(), f"{file}, line {number}, {line.strip()!r}")
            for number, line in enumerate(_read(file).splitlines(), 1)
            if line.strip() and not line.lstrip().startswith("#")
        ]
    names: set[str] = set()
    for spec in specs:
        if spec.name in names:
            raise InvalidSettings(f"pod {spec.name!r} is configured twice")
        names.add(spec.name)
    return tuple(specs)


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(_FILE_BYTES_MAX + 1)
        if len(content) > _FILE_BYTES_MAX:
            raise InvalidSettings(f"pods_file {str(file)!r} is longer than {_FILE_BYTES_MAX} bytes")
        return content.decode()
    except OSError as error:
        raise InvalidSettings(f"pods_file {str(file)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidSettings(f"pods_file {str(file)!r} is not UTF-8 text") from error


def _parse(text: str, place: str) -> PodSpec:
    head, *options = text.split(",")
    name, _, endpoint = head.partition("=")
    values: dict[str, str] = {"zmq_endpoint": endpoint.strip()} if endpoint.strip() else {}
    for option in options:
        key, separator, value = option.partition("=")
        key = {"replay": "replay_endpoint"}.get(key.strip(), key.strip())
        if not separator or key in values:
            raise InvalidSettings(f"{place}: {option!r} is not one key=value, each key once")
        values[key] = value.strip()
    try:
        return pod_spec(name.strip(), PodRequest.model_validate(values))
    except ValidationError as error:
        fault = error.errors()[0]
        raise InvalidSettings(f"{place}: {fault['loc'][0]}: {fault['msg']}") from None
    except InvalidInput as error:
        raise InvalidSettings(f"{place}: {error.field}: {error}") from None
