"""Chat messages as vLLM hands them to a chat template (vllm/entrypoints/chat_utils.py does the same).

A template reads `content` either as one text or as a list of parts, and which of the two is found by looking
at its syntax tree: it wants parts if it loops over the content of a message. Text parts are joined with a
line break for the former; a text is made one part for the latter. The arguments of tool calls come from
clients as JSON text, and templates want them as objects. Tools are written with their fields in one order
and missing ones as null, because templates print them as they are, and one byte more is another prompt.

Refused: parts that are no text. What stands for an image in a prompt is made by the engine's processor; a
router that has the engine's token ids sends them with `extra_keys`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import msgspec

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")


class Refused(Exception):
    """A message that cannot be rendered; `field` says which."""

    def __init__(self, detail: str, *, field: str) -> None:
        super().__init__(detail)
        self.detail = detail
        self.field = field


def conversation(messages: Any, *, wants_parts: bool) -> list[dict[str, Any]]:
    """The messages of a request as a template takes them. Raises Refused."""
    if not isinstance(messages, list) or not messages:
        raise Refused("messages is a list of at least one message", field="messages")
    return [_message(message, f"messages[{i}]", wants_parts) for i, message in enumerate(messages)]


def template_tools(tools: Any) -> list[dict[str, Any]] | None:
    """The tools of a request as a template takes them; None for none. Raises Refused."""
    if not tools:
        return None
    if not isinstance(tools, list):
        raise Refused("tools is a list", field="tools")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


@functools.lru_cache(maxsize=64)
def wants_parts(template: str) -> bool:
    """Whether a template loops over the content of a message."""
    try:
        tree = _parse(template)
    except jinja2.TemplateSyntaxError:
        return False
    names = {name for name, value in _assignments(tree) if _is_content(value, frozenset())}
    return any(_is_content(loop.iter, frozenset(names)) for loop in tree.find_all(jinja2.nodes.For))


@functools.lru_cache(maxsize=64)
def template_variables(template: str) -> frozenset[str]:
    """The names that a template expects from outside."""
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(_parse(template)))
    except jinja2.TemplateSyntaxError:
        return frozenset()


def _message(message: Any, place: str, wants_parts: bool) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused("a message is an object with a role", field=place)
    made = {**message, "content": _content(message.get("content"), f"{place}.content", wants_parts)}
    calls = message.get("tool_calls")
    if message["role"] == "assistant" and isinstance(calls, list):
        made["tool_calls"] = [_tool_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return made


def _content(content: Any, place: str, wants_parts: bool) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        texts = [content]
    elif content is None:
        texts = []
    elif isinstance(content, list):
        texts = [_text(part, f"{place}[{index}]") for index, part in enumerate(content)]
    else:
        raise Refused("content is a text, a list of parts or null", field=place)
    return [{"type": "text", "text": text} for text in texts] if wants_parts else "\n".join(texts)


def _text(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        raise Refused(
            f"a part of type {kind!r} is not text: send the engine's token_ids, with extra_keys", field=place
        )
    text = part.get("text", part.get(kind))
    if not isinstance(text, str):
        raise Refused("a part without its text", field=place)
    return text


def _tool_call(call: Any, place: str) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str) or arguments is None:
        try:
            arguments = msgspec.json.decode(arguments) if arguments else {}
        except (msgspec.DecodeError, RecursionError):
            raise Refused("the arguments are not JSON", field=f"{place}.function.arguments") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _tool(tool: Any, place: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused("a tool is an object with a function that has a name", field=place)
    ordered = {"name": function["name"], "description": None, "parameters": None, **function}
    return {"type": "function", **tool, "function": ordered}


# -- syntax trees


def _parse(template: str) -> jinja2.nodes.Template:
    # The tags that transformers knows beside those of jinja2: {% break %}, {% continue %}, {% generation %}.
    return jinja2.Environment(extensions=[jinja2.ext.loopcontrols, _Generation]).parse(template)


class _Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _assignments(tree: jinja2.nodes.Template) -> Iterator[tuple[str, jinja2.nodes.Node]]:
    for assignment in tree.find_all(jinja2.nodes.Assign):
        if isinstance(assignment.target, jinja2.nodes.Name):
            yield assignment.target.name, assignment.node


def _is_content(node: jinja2.nodes.Node, names: frozenset[str]) -> bool:
    """Is this the content of a message, or one of `names` that stand for it; filters do not matter."""
    match node:
        case jinja2.nodes.Filter(node=inner) if inner is not None:
            return _is_content(inner, names)
        case jinja2.nodes.Getattr(attr="content"):
            return True
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
            return True
        case jinja2.nodes.Name(name=name):
            return name in names
    return False
