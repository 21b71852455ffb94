"""Pods as the operator writes them, on the command line, in a setting or in a file: one line a pod.

    pod-a=tcp://10.0.0.7:5557,model=llama-3,replay=tcp://10.0.0.7:6557,block_size=16,dp_size=2

The first part names the pod and where it publishes (nothing after `=`: it posts its events by HTTP); of
the others only `model` must be there. A pods file has one such line a pod, so that there is one notation
to know; blank lines and lines that begin with `#` are skipped. Values cannot contain a comma; every key
is known or refused, with its place.
"""

from __future__ import annotations

from pathlib import Path

from app.endpoints import check_metrics_url, rank_endpoints
from app.errors import InvalidInput
from app.pods import PodSpec

PODS_FILE_BYTES_MAX = 16 * 1024 * 1024
_SPEC_FIELDS = {
    "model": "model",
    "replay": "replay_endpoint",
    "block_size": "block_size",
    "dp_size": "dp_size",
    "lora": "lora",
    "topic": "topic",
    "metrics": "metrics_url",
}
_NUMBERS = frozenset({"block_size", "dp_size"})


def parse_pod(text: str) -> PodSpec:
    """Raises InvalidInput that says which part is wrong."""
    first, *others = text.strip().split(",")
    name, separator, endpoint = (part.strip() for part in first.partition("="))
    if not name or not separator:
        raise InvalidInput(f"{text!r} does not begin with name=tcp://host:port", field="name")
    values: dict[str, str | int | None] = {}
    for part in others:
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if key not in _SPEC_FIELDS:
            known = ", ".join(_SPEC_FIELDS)
            raise InvalidInput(f"pod {name!r}: {key!r} is none of {known}", field=f"{name}.{key}")
        if _SPEC_FIELDS[key] in values:
            raise InvalidInput(f"pod {name!r}: {key} is there twice", field=f"{name}.{key}")
        if not separator or not value:
            raise InvalidInput(f"pod {name!r}: {key} has no value", field=f"{name}.{key}")
        values[_SPEC_FIELDS[key]] = _number(name, key, value) if key in _NUMBERS else value
    if "model" not in values:
        raise InvalidInput(f"pod {name!r} has no model", field=f"{name}.model")
    spec = PodSpec(name, zmq_endpoint=endpoint or None, **values)  # type: ignore[arg-type]
    if spec.metrics_url is not None:
        check_metrics_url(spec.metrics_url)
    _check_endpoints(spec)
    return spec


def parse_pods(lines: str, *, origin: str) -> tuple[PodSpec, ...]:
    """The pods of a pods file. Raises InvalidInput that names `origin`, the line and the fault."""
    specs: dict[str, PodSpec] = {}
    for number, line in enumerate(lines.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            spec = parse_pod(line)
        except InvalidInput as error:
            raise InvalidInput(f"{origin}, line {number}: {error}", field=error.field) from error
        if spec.name in specs:
            raise InvalidInput(f"{origin}, line {number}: pod {spec.name!r} is there twice", field=spec.name)
        specs[spec.name] = spec
    return tuple(specs.values())


def read_pods_file(path: Path) -> tuple[PodSpec, ...]:
    """Raises InvalidInput, also when the file cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(PODS_FILE_BYTES_MAX + 1)
        if len(content) > PODS_FILE_BYTES_MAX:
            raise InvalidInput(f"{path} is larger than {PODS_FILE_BYTES_MAX} bytes", field="pods_file")
        return parse_pods(content.decode(), origin=str(path))
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", field="pods_file") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8: {error.reason}", field="pods_file") from error


def _number(pod: str, key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()) or int(value[:10]) < 1 or len(value) > 9:
        raise InvalidInput(
            f"pod {pod!r}: {key}={value} is not a whole number from 1 on", field=f"{pod}.{key}"
        )
    return int(value)


def _check_endpoints(spec: PodSpec) -> None:
    if spec.zmq_endpoint is None:
        if spec.replay_endpoint is not None:
            raise InvalidInput(
                f"pod {spec.name!r}: a replay without a stream to follow", field=f"{spec.name}.replay"
            )
        return
    try:
        rank_endpoints(spec.zmq_endpoint, spec.replay_endpoint, spec.dp_size)
    except InvalidInput as error:
        raise InvalidInput(f"pod {spec.name!r}: {error}", field=f"{spec.name}.{error.field}") from error
