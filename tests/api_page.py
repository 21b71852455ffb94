"""Writes the section `Routes` of docs/api.md: `python -m tests.api_page`; tests/test_api_page.py holds it equal.

What a route takes and answers is read from the OpenAPI document of a running indexer; each example is asked of that
indexer and shown with what it answered. Only what differs from run to run (ages, times, memory) is replaced.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.api_examples import EXAMPLES, Example
from tests.serving.test_serving import serving

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
BEGIN = "<!-- begin: written by `python -m tests.api_page` -->\n"
END = "<!-- end -->\n"
METHODS = ("post", "get", "put", "delete")
WIDTH = 112

# What no two runs have in common, and what the page shows in its place.
VOLATILE: Mapping[str, Any] = {
    "last_event_age_s": 0.4,
    "uptime_s": 12.5,
    "ts": 1795226400.5,
    "request_id": "5d0c9a1be7f24c68-2a",
    "bytes": 131072,
    "event_id": "Lookup44a3a870-91bd-439f-a185-4cde38779e45",
}

Document = Mapping[str, Any]


@contextlib.contextmanager
def running() -> Iterator[httpx.Client]:
    with (
        serving("serve", "--port", "0") as (_, port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        yield http


def operations(document: Document) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for path, item in document["paths"].items():
        for method in METHODS:
            if method in item:
                yield method.upper(), path, item[method]


def all_examples(document: Document) -> list[Example]:
    """In the order in which they are asked: those of the table, those of the schemas, deletions."""
    known = {(method, path) for method, path, _ in operations(document)}
    listed = [example for example in EXAMPLES if (example.method, example.route) in known]
    covered = {(example.method, example.route) for example in listed} | {("GET", "/v1/live")}
    more = [
        Example(
            method,
            path,
            path.replace("{pod}", "pod-a"),
            _schema_example(document, operation),
            status=0,
        )
        for method, path, operation in operations(document)
        if (method, path) not in covered
    ]
    everything = [*(e for e in listed if e.method != "DELETE"), *more]
    return everything + [e for e in listed if e.method == "DELETE"]


def ask(http: httpx.Client, example: Example) -> httpx.Response:
    response = http.request(example.method, example.path, json=example.body)
    fits = response.status_code == example.status if example.status else response.is_success
    assert fits, (example, response.status_code, response.text)
    return response


def routes(http: httpx.Client) -> str:
    """The section, from its first heading on."""
    document = http.get("/openapi.json").json()
    shown: dict[tuple[str, str], list[str]] = {}
    for example in all_examples(document):
        shown.setdefault((example.method, example.route), []).append(_show(example, ask(http, example)))
    shown["GET", "/v1/live"] = [_show_live(http)]
    used: dict[str, None] = {}
    parts = []
    for method, path, operation in operations(document):
        examples = "\n".join(shown[method, path])
        parts.append(f"### {method} {path}\n\n{_about(document, operation, used)}\n{examples}")
    described = 0
    while described < len(used):  # an object names others
        parts.append(_object(document, list(used)[described], used))
        described += 1
    return "\n".join(parts)


def _about(document: Document, operation: Mapping[str, Any], used: dict[str, None]) -> str:
    lines = [_prose(operation["description"]), "", _needed(operation), ""]
    parameters = [p for p in operation.get("parameters", ()) if p["in"] == "query"]
    if parameters:
        lines += ["| query parameter | type | meaning |", "|---|---|---|"]
        lines += [
            _row(p["name"], p["schema"], p.get("description", ""), p["required"], used) for p in parameters
        ]
        lines.append("")
    content = operation.get("requestBody", {}).get("content", {})
    if content:
        name = _model_name(content["application/json"]["schema"])
        lines += [f"Body ({', '.join(f'`{kind}`' for kind in content)}):", ""]
        lines += [*_fields(document["components"]["schemas"][name], "field", used), ""]
    for status, answer in operation["responses"].items():
        if status == "default":
            continue
        kinds = ", ".join(f"`{kind}`" for kind in answer.get("content", {}))
        lines += [f"{status}: {answer['description']} {f'({kinds})' if kinds else ''}".rstrip(), ""]
        schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
        if "$ref" in schema:
            name = _model_name(schema)
            lines += [*_fields(document["components"]["schemas"][name], "field", used), ""]
    return "\n".join(lines)


def _needed(operation: Mapping[str, Any]) -> str:
    """The scope of the key, where keys are set."""
    if not operation["security"]:
        return "Needs no key."
    (scope,) = operation["security"][0]["key"]
    return f"Needs a key of scope `{scope}`, where keys are set."


def _object(document: Document, name: str, used: dict[str, None]) -> str:
    schema = document["components"]["schemas"][name]
    said = _prose(schema.get("description", ""))
    return "\n".join([f"### {name}", "", said, "", *_fields(schema, "field", used), ""])


def _fields(schema: Mapping[str, Any], head: str, used: dict[str, None]) -> list[str]:
    required = schema.get("required", ())
    rows = [
        _row(name, field, field.get("description", ""), name in required, used)
        for name, field in schema["properties"].items()
    ]
    return [f"| {head} | type | meaning |", "|---|---|---|", *rows]


def _row(
    name: str, schema: Mapping[str, Any], description: str, required: bool, used: dict[str, None]
) -> str:
    default = schema.get("default")
    said = description + (f" Default `{json.dumps(default)}`." if default is not None else "")
    needed = "" if not required else ", required"
    return f"| `{name}` | {_kind(schema, used)}{needed} | {said.strip()} |"


def _kind(schema: Mapping[str, Any], used: dict[str, None]) -> str:
    if "$ref" in schema:
        name = _model_name(schema)
        used.setdefault(name)
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(choice, used) for choice in schema["anyOf"]))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(choice)}`" for choice in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"array of {_kind(schema.get('items', {}), used)}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {_kind(schema['additionalProperties'], used)}"
    bounds = (schema.get("minimum"), schema.get("maximum"))
    if bounds[0] is not None and bounds[1] is not None:
        return f"{kind} {bounds[0]} to {bounds[1]}"
    return f"{kind} from {bounds[0]}" if bounds[0] is not None else str(kind)


def _show(example: Example, response: httpx.Response) -> str:
    lines = [example.say, ""] if example.say else []
    method = "" if example.method in ("GET", "POST") else f"-X {example.method} "
    url = f"'localhost:8080{example.path}'" if "?" in example.path else f"localhost:8080{example.path}"
    command = f"curl -s {method}{url}"
    if example.body is not None:
        command += f" -H 'content-type: application/json' -d '\n{pretty(example.body)}'"
    lines += ["```sh", command, "```", ""]
    kind = response.headers.get("content-type", "").partition(";")[0]
    if kind.endswith("json") and kind != "application/x-ndjson":
        lines += ["```json", pretty(settled(response.json())), "```", ""]
    elif kind == "application/x-ndjson":
        lines += ["```json", *(pretty(json.loads(line)) for line in response.text.splitlines()), "```", ""]
    elif kind == "text/plain":
        told = [
            line for line in response.text.splitlines() if re.match("kvindexer_(pods|index_prefixes) ", line)
        ]
        lines += ["```", *told, "...", "```", ""]
    else:
        assert not response.content, kind
        lines += [f"It answers {response.status_code} and no body.", ""]
    return "\n".join(lines)


def _show_live(http: httpx.Client) -> str:
    with http.stream("GET", "/v1/live") as response:
        lines = response.iter_lines()
        told = [next(lines), next(lines)]
        ask(http, Example("POST", "/v1/events", "/v1/events", {"pod": "pod-b", "seq": 1, "events": []}))
        while not told[-1].startswith("data: "):
            told.append(next(lines))
    told[-1] = "data: " + json.dumps(settled(json.loads(told[-1][6:])), separators=(",", ":"))
    return "\n".join(["```sh", "curl -sN localhost:8080/v1/live", "```", "", "```", *told, "```", ""])


def settled(value: Any) -> Any:
    """The value without what differs from run to run."""
    if isinstance(value, dict):
        return {
            key: VOLATILE[key] if key in VOLATILE and inner is not None else settled(inner)
            for key, inner in value.items()
        }
    return [settled(inner) for inner in value] if isinstance(value, list) else value


def pretty(value: Any, indent: int = 0) -> str:
    """JSON that breaks only what is wider than a line."""
    flat = json.dumps(value)
    if len(flat) + indent <= WIDTH or not isinstance(value, dict | list):
        return flat
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {pretty(inner, indent + len(key) + 5)}" for key, inner in value.items()]
        return "{" + f",\n{pad}".join(parts) + "}"
    return "[" + f",\n{pad}".join(pretty(inner, indent + 1) for inner in value) + "]"


def _prose(text: str) -> str:
    """Docstrings are wrapped for the code; here a paragraph is a line."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _schema_example(document: Document, operation: Mapping[str, Any]) -> Mapping[str, Any] | None:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return None
    example: Mapping[str, Any] = document["components"]["schemas"][_model_name(content["schema"])][
        "examples"
    ][0]
    return example


def _model_name(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def page(text: str, section: str) -> str:
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{section}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    with running() as client:
        PAGE.write_text(page(PAGE.read_text(), routes(client)))
