"""Raw bodies in, plain values out: the only module that parses what clients send, and that writes what they
get.

A query of 4,096 tokens is a few short fields and one long array. Validating the array element by element as
Python objects costs far more than the match itself, so the body is cut into raw fields first (msgspec.Raw),
the arrays go to their parsers as they are, and only the short fields are decoded and validated, by the
models of app/schemas.

Nothing is built for a body before it is known to be small: arrays are counted before msgspec makes a list of
them, and a field that holds one value is never decoded as anything else. Without that, 16 MiB of `[0,0,0` are
half a gigabyte of objects.

Refused, each with its place: what is not the notation its Content-Type says, nesting beyond reason, unknown
fields, numbers out of range, and bodies past `body_bytes_max`, which is enforced while they stream in:
never more than the bound is held, whatever Content-Length says or does not say.
"""

from __future__ import annotations

import array
import functools
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

import msgspec
from fastapi import Request, Response
from pydantic import BaseModel, ValidationError
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException

from app import _native
from app.api.problems import place, sentence
from app.errors import BodyTooLarge, InvalidInput, LimitExceeded, UnreadableBody
from app.ingest.wire_notation import KEY_BYTES_MAX, Scalar

JSON = "application/json"
MSGPACK = "application/msgpack"
OCTETS = "application/octet-stream"

_MSGPACK_NAMES = frozenset({MSGPACK, "application/x-msgpack", "application/vnd.msgpack"})
_FIELDS_MAX = 64
_NULL = {JSON: b"null", MSGPACK: b"\xc0"}
_MSGPACK_MAPS = frozenset(bytes([byte]) for byte in (*range(0x80, 0x90), 0xDE, 0xDF))
_PARSERS = {  # by notation and bytes a number
    (JSON, 4): _native.json_token_ids,
    (JSON, 8): _native.json_unsigned,
    (MSGPACK, 4): _native.msgpack_token_ids,
    (MSGPACK, 8): _native.msgpack_unsigned,
}
_SIGNED_PARSERS = {(JSON, 8): _native.json_hashes, (MSGPACK, 8): _native.msgpack_hashes}

_ENCODERS: Mapping[str, Callable[[Any], bytes]] = {JSON: msgspec.json.encode, MSGPACK: msgspec.msgpack.encode}

Fields = dict[str, msgspec.Raw]
Model = TypeVar("Model", bound=BaseModel)
Kind = TypeVar("Kind")


# -- what the request carries


def content_type(request: Request, *accepted: str) -> str:
    """The notation of the body, one of `accepted`; JSON when the request does not say."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HTTPException(415, "a compressed body is not accepted: send it without Content-Encoding")
    said = request.headers.get("content-type")
    name = JSON if said is None else said.partition(";")[0].strip().lower()
    name = MSGPACK if name in _MSGPACK_NAMES else name
    if name not in accepted:
        raise HTTPException(415, f"Content-Type {name!r} is not accepted here: send {' or '.join(accepted)}")
    return name


async def read_body(request: Request, bytes_max: int) -> bytes:
    """The whole body. Raises BodyTooLarge before more than `bytes_max` bytes are held."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > bytes_max):
        raise _too_large(bytes_max)
    first = b""
    # One buffer that grows, not a list of chunks: chunks of two bytes would cost twenty times their size.
    body: bytearray | None = None
    async for chunk in request.stream():
        if not chunk:
            continue
        if len(first if body is None else body) + len(chunk) > bytes_max:
            raise _too_large(bytes_max)
        if not first:
            first = chunk
        elif body is None:
            body = bytearray(first + chunk)
        else:
            body += chunk
    return first if body is None else bytes(body)


def _too_large(bytes_max: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is longer than body_bytes_max = {bytes_max} bytes", bound="body_bytes_max")


# -- short fields


def cut_fields(body: bytes | msgspec.Raw, notation: str) -> Fields:
    """The fields of an object, each still raw."""
    if _count_children(body, notation, _FIELDS_MAX) > _FIELDS_MAX:
        raise InvalidInput(f"the object has more than {_FIELDS_MAX} fields")
    fields: Fields = _decode(body, notation, Fields)
    return fields


def validate(
    model: type[Model],
    fields: Fields,
    notation: str,
    *,
    beside: tuple[str, ...] = (),
    lists: Mapping[str, int] = MappingProxyType({}),
) -> Model:
    """The model of all fields but those `beside` it, which the caller parses itself.

    Every field is one plain value, but for `lists`: name -> texts that it holds at most.
    """
    values: dict[str, Any] = {}
    for name, raw in fields.items():
        if name in beside:
            continue
        if name in lists:
            if _count_children(raw, notation, lists[name]) > lists[name]:
                raise InvalidInput(f"{name} has more than {lists[name]} elements", field=name)
            values[name] = _decode(raw, notation, list[str] | None, name)
        else:
            # A field that is not known is refused by its name, whatever it holds.
            values[name] = _decode(raw, notation, Scalar, name) if name in model.model_fields else None
    return _validated(model, values, strict=True)


def decode_rest(decoder: msgspec.json.Decoder[Kind], rest: bytes, commas_max: int) -> Kind | None:
    """A body that `_native.json_cut` took the arrays out of; None when it is not what the decoder reads.

    `commas_max` bounds the values that are built for it.
    """
    if rest.count(b",") > commas_max:
        return None
    try:
        return decoder.decode(rest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def validate_query(model: type[Model], request: Request, *, lists: tuple[str, ...] = ()) -> Model:
    """The model of the query parameters; those in `lists` are separated by commas or repeated."""
    return validate_params(model, request.query_params, lists=lists)


def validate_params(model: type[Model], params: QueryParams, *, lists: tuple[str, ...] = ()) -> Model:
    values: dict[str, Any] = {}
    for name, value in params.multi_items():
        if name in lists:
            values.setdefault(name, []).extend(part for part in value.split(",") if part)
        elif name in values:
            raise InvalidInput(f"query parameter {name} is given twice", field=name)
        else:
            values[name] = value
    return _validated(model, values, strict=False)


def refuse_query(request: Request) -> None:
    """Everything is in the body or in the path, so a query parameter is a mistake that would pass unseen."""
    for name in request.query_params:
        hint = ": it belongs into the body" if request.method in ("POST", "PUT") else ""
        raise InvalidInput(f"query parameter {name} is not known here{hint}", field=name)


def _validated(model: type[Model], values: Mapping[str, Any], *, strict: bool) -> Model:
    try:
        return model.model_validate(values, strict=strict)
    except ValidationError as error:
        faults = [(place(fault["loc"]), fault["msg"]) for fault in error.errors(include_url=False)]
        raise InvalidInput(sentence(faults), field=faults[0][0], faults=faults) from None


def raw_value(fields: Fields, notation: str, name: str) -> bytes | None:
    """A field as it came; None when absent or null."""
    raw = fields.get(name)
    if raw is None or memoryview(raw) == _NULL[notation]:
        return None
    return bytes(raw)


def objects(fields: Fields, notation: str, name: str, kind: type[Kind], count_max: int) -> Mapping[str, Kind]:
    """An object of objects of one kind; empty when absent or null. Numbers are finite."""
    raw = raw_value(fields, notation, name)
    if raw is None:
        return {}
    if _count_children(raw, notation, count_max) > count_max:
        raise InvalidInput(f"{name} has more than {count_max} entries", field=name)
    made: dict[str, Kind] = _decode(msgspec.Raw(raw), notation, dict[str, kind], name)  # type: ignore[valid-type]
    for key, value in made.items():
        for part, number in msgspec.structs.asdict(cast(msgspec.Struct, value)).items():
            if number != number:
                raise InvalidInput(f"{name}.{key}.{part} is not a number", field=f"{name}.{key}.{part}")
    return made


# -- arrays


def token_ids(fields: Fields, notation: str, tokens_max: int, *, name: str = "token_ids") -> bytes | None:
    """`token_ids` as uint32, little-endian; None when absent or null. No object a token is made."""
    return _numbers(fields, name, 4, notation, tokens_max)


def signed_hashes(fields: Fields, notation: str, hashes_max: int, *, name: str) -> bytes | None:
    """Hashes as uint64, little-endian, negative ones as two's complement; None when absent or null."""
    return _numbers(fields, name, 8, notation, hashes_max, parsers=_SIGNED_PARSERS)


def prefix_hashes(fields: Fields, notation: str, hashes_max: int) -> bytes | None:
    """`prefix_hashes` as uint64, little-endian; None when absent or null."""
    return _numbers(fields, "prefix_hashes", 8, notation, hashes_max)


def _numbers(
    fields: Fields,
    name: str,
    width: int,
    notation: str,
    count_max: int,
    *,
    parsers: Mapping[tuple[str, int], Callable[[msgspec.Raw], bytes]] = MappingProxyType(_PARSERS),
) -> bytes | None:
    raw = fields.get(name)
    if raw is None or memoryview(raw) == _NULL[notation]:
        return None
    try:
        buffer = parsers[notation, width](raw)
    except _native.WireError as error:
        field = f"{name}[{error.index}]" if str(error).startswith("element") else name
        raise InvalidInput(f"{name}: {error}", field=field) from None
    _check_count(name, len(buffer) // width, count_max)
    return buffer


def octet_hashes(body: bytes, hashes_max: int) -> bytes:
    if len(body) % 8:
        raise InvalidInput(f"{len(body)} bytes are not a whole number of prefix hashes of 8 bytes")
    _check_count("prefix_hashes", len(body) // 8, hashes_max)
    return body


def octet_token_ids(body: bytes, tokens_max: int) -> bytes:
    if len(body) % 4:
        raise InvalidInput(f"{len(body)} bytes are not a whole number of token ids of 4 bytes")
    _check_count("token_ids", len(body) // 4, tokens_max)
    return body


def extra_keys(fields: Fields, notation: str) -> list[list[Any] | None] | None:
    """`extra_keys` as they are; what a key may be is checked where they are encoded."""
    raw = fields.get("extra_keys")
    if raw is None:
        return None
    if len(memoryview(raw)) > KEY_BYTES_MAX:
        raise InvalidInput(f"extra_keys is longer than {KEY_BYTES_MAX} bytes", field="extra_keys")
    keys: list[list[Any] | None] | None = _decode(raw, notation, list[list[Any] | None] | None, "extra_keys")
    return keys


def raw_list(fields: Fields, notation: str, name: str, *, count_max: int, bound: str) -> list[msgspec.Raw]:
    """The elements of an array, each still raw. Raises LimitExceeded before more than `count_max` are made."""
    if name not in fields:
        raise InvalidInput(f"{name} is needed", field=name)
    if _count_children(fields[name], notation, count_max) > count_max:
        raise LimitExceeded(f"more {name} than {bound} = {count_max}", bound=bound)
    items: list[msgspec.Raw] = _decode(fields[name], notation, list[msgspec.Raw], name)
    return items


def _count_children(raw: bytes | msgspec.Raw, notation: str, count_max: int) -> int:
    """Elements of an array or entries of an object, counted without making any."""
    if notation == JSON:
        return _native.json_child_count(raw, count_max)
    count = _native.msgpack_child_count(raw)
    return count // 2 if bytes(memoryview(raw)[:1]) in _MSGPACK_MAPS else count


def _check_count(name: str, count: int, count_max: int) -> None:
    if count > count_max:
        raise LimitExceeded(f"{count} {name} are more than tokens_max = {count_max}", bound="tokens_max")


# -- notations

_PLACE = re.compile(r"^(?P<detail>.*) - at `\$\.?(?P<place>.*)`$", re.DOTALL)
_NESTED = "nested too deeply"


@functools.lru_cache(maxsize=64)
def _decoder(notation: str, kind: Any) -> Callable[[bytes | msgspec.Raw], Any]:
    return (msgspec.json.Decoder(kind) if notation == JSON else msgspec.msgpack.Decoder(kind)).decode


def _decode(body: bytes | msgspec.Raw, notation: str, kind: Any, field: str = "") -> Any:
    try:
        return _decoder(notation, kind)(body)
    except msgspec.ValidationError as error:
        found = _PLACE.match(str(error))
        detail, inner = (found["detail"], found["place"]) if found else (str(error), "")
        where = field + (inner if inner.startswith("[") or not (field and inner) else f".{inner}")
        raise InvalidInput(f"{where}: {detail}" if where else detail, field=where) from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise UnreadableBody(f"the body is not {_name(notation)}: {error}", field=field) from None
    except RecursionError:
        raise UnreadableBody(
            f"the body is not {_name(notation)} that we read: {_NESTED}", field=field
        ) from None


def _name(notation: str) -> str:
    return "JSON" if notation == JSON else "msgpack"


# -- answers


def answer(request: Request, content: Any, status: int = 200) -> Response:
    """`content` in the notation that the request prefers; JSON unless it asks for msgpack."""
    notation = answer_notation(request)
    return Response(_ENCODERS[notation](content), status, media_type=notation)


def answer_notation(request: Request) -> str:
    return MSGPACK if wants_msgpack(request.headers.get("accept", "")) else JSON


def part(content: Any, notation: str) -> msgspec.Raw:
    """A part of an answer, encoded before the others are made."""
    return msgspec.Raw(_ENCODERS[notation](content))


@functools.lru_cache(maxsize=256)
def wants_msgpack(accept: str) -> bool:
    weights = {"json": 0.0, "msgpack": 0.0}
    for entry in accept.lower().split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        weight = next((_weight(text[2:]) for text in parameters if text.startswith("q=")), 1.0)
        if name in _MSGPACK_NAMES:
            weights["msgpack"] = max(weights["msgpack"], weight)
        elif name in (JSON, "application/*", "*/*"):
            weights["json"] = max(weights["json"], weight if name == JSON else weight / 1_000)
    return weights["msgpack"] > weights["json"]


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def numbers_of(hashes: bytes) -> list[int]:
    """uint64, little-endian, as what an answer shows."""
    return array.array("Q", hashes).tolist()
