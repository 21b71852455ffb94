"""The OpenAPI document of routes that read their bodies raw.

Handlers take the request as it is, so the framework cannot see what they accept; each route says it with
`described`, and `install` puts the models that these descriptions refer to into the document.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from app import schemas
from app.api.access import needed_scope
from app.api.bodies import JSON, MSGPACK, OCTETS
from app.api.problems import CONTENT_TYPE as PROBLEM

_REFERENCE = "#/components/schemas/{model}"
PROBLEMS: dict[str, Any] = {
    "description": "A problem.",
    "content": {PROBLEM: {"schema": {"$ref": _REFERENCE.format(model="Problem")}}},
}
_KEY = "key"
_KEY_SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": "A key of KVINDEXER_API_KEYS or KVINDEXER_API_KEYS_FILE; where there is none, nothing is needed. "
    "`write` includes `read`.",
}
_OCTET_SCHEMA = {
    "type": "string",
    "format": "binary",
    "description": "Token ids as little-endian uint32, or with `hashes=true` prefix hashes as uint64.",
}
_PAYLOAD_SCHEMA = {"type": "string", "format": "binary", "description": "The payload frame of an engine."}


def described(
    answer: type[BaseModel],
    *,
    body: type[BaseModel] | None = None,
    query: type[BaseModel] | None = None,
    octets: bool = False,
    engine_payload: bool = False,
) -> dict[str, Any]:
    """Keyword arguments for a route: its answer, and where it has them its body and its query parameters.

    `octets` adds the raw token ids as a body, `engine_payload` makes msgpack that of an engine.
    """
    extra: dict[str, Any] = {}
    if body is not None:
        schema = {"schema": _reference(body)}
        content: dict[str, Any] = {JSON: schema, MSGPACK: schema}
        if engine_payload:
            content[MSGPACK] = {"schema": _PAYLOAD_SCHEMA}
        if octets:
            content[OCTETS] = {"schema": _OCTET_SCHEMA}
        extra["requestBody"] = {"required": True, "content": content}
    if query is not None:
        extra["parameters"] = _parameters(query, required=body is None)
    return {
        "responses": {
            200: {"model": answer, "description": _first_line(answer), "content": {MSGPACK: {}}},
            "default": PROBLEMS,
        },
        "openapi_extra": extra,
    }


def described_stream(
    media_type: str,
    description: str,
    *,
    line: type[BaseModel] | None = None,
    query: type[BaseModel] | None = None,
) -> dict[str, Any]:
    """Keyword arguments for a route whose answer is a stream of text: of lines of `line`, or of no model."""
    text: dict[str, Any] = {"type": "string"}
    if line is not None:
        text["description"] = f"Each line is a JSON object: {line.__name__}."
    return {
        "response_class": Response,
        "responses": {
            200: {"description": description, "content": {media_type: {"schema": text}}},
            "default": PROBLEMS,
        },
        "openapi_extra": {} if query is None else {"parameters": _parameters(query, required=False)},
    }


def install(app: FastAPI) -> None:
    """Completes the document that `app` serves; made once, when first asked for."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            components = made.setdefault("components", {})
            components.setdefault("schemas", {}).update(_model_schemas())
            components["securitySchemes"] = {_KEY: _KEY_SCHEME}
            for path, item in made["paths"].items():
                for method, operation in item.items():
                    operation["security"] = _security(method.upper(), path)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _security(method: str, path: str) -> list[dict[str, list[str]]]:
    scope = needed_scope(method, path)
    return [] if scope is None else [{_KEY: [scope.value]}]


def _model_schemas() -> dict[str, Any]:
    """Of all in app/schemas: a body that is read raw is named by reference only."""
    files = [module.name for module in pkgutil.iter_modules(schemas.__path__, f"{schemas.__name__}.")]
    values = [value for file in files for value in vars(importlib.import_module(file)).values()]
    models = {value for value in values if isinstance(value, type) and issubclass(value, BaseModel)}
    _, definitions = models_json_schema(
        [(model, "validation") for model in sorted(models - {BaseModel}, key=lambda model: model.__name__)],
        ref_template=_REFERENCE,
    )
    return dict(definitions["$defs"])


def _parameters(query: type[BaseModel], *, required: bool) -> list[dict[str, Any]]:
    schema = query.model_json_schema(ref_template=_REFERENCE)
    parameters = []
    for name, field in schema["properties"].items():
        parameter = {
            "name": name,
            "in": "query",
            "required": required and name in schema.get("required", ()),
            "schema": {key: value for key, value in field.items() if key != "description"},
        }
        if "description" in field:
            parameter["description"] = field["description"]
        parameters.append(parameter)
    return parameters


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}


def _first_line(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().partition("\n")[0]
