"""What templates are given is what vLLM gives them."""

from __future__ import annotations

from typing import Any

import pytest

from app.tokenizer.chat import Refused, conversation, template_tools, template_variables, wants_parts
from tests.tokenizers import PARTS_TEMPLATE, TEMPLATE


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TEMPLATE, False),
        (PARTS_TEMPLATE, True),
        (
            "{% for m in messages %}{% set c = m['content'] %}{% for p in c %}{{ p }}{% endfor %}{% endfor %}",
            True,
        ),
        ("{% for m in messages %}{% for p in m['content'] | list %}{{ p }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set c = m.content | trim %}{{ c }}{% endfor %}", False),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}",
            False,
        ),
        ("{% this is no template", False),
    ],
)
def test_what_a_template_wants(template: str, expected: bool) -> None:
    assert wants_parts(template) is expected


@pytest.mark.parametrize(
    ("content", "text", "parts"),
    [
        ("hi", "hi", [{"type": "text", "text": "hi"}]),
        (None, "", []),
        ([], "", []),
        ([{"type": "text", "text": "a"}, "b"], "a\nb", [{"type": "text", "text": t} for t in "ab"]),
        ([{"type": "input_text", "text": "a"}], "a", [{"type": "text", "text": "a"}]),
        ([{"type": "refusal", "refusal": "no"}], "no", [{"type": "text", "text": "no"}]),
    ],
)
def test_content(content: Any, text: str, parts: list[Any]) -> None:
    message = {"role": "user", "name": "ann", "content": content}
    assert conversation([message], wants_parts=False) == [{"role": "user", "name": "ann", "content": text}]
    assert conversation([message], wants_parts=True) == [{"role": "user", "name": "ann", "content": parts}]


def test_arguments_of_tool_calls_become_objects() -> None:
    def call(arguments: Any) -> dict[str, Any]:
        return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}

    calls = [call('{"place": "Oslo"}'), call(""), call(None), call({"a": 1})]
    (made,) = conversation([{"role": "assistant", "content": None, "tool_calls": calls}], wants_parts=False)
    arguments = [made_call["function"]["arguments"] for made_call in made["tool_calls"]]
    assert arguments == [{"place": "Oslo"}, {}, {}, {"a": 1}]
    assert calls[0]["function"]["arguments"] == '{"place": "Oslo"}', "the request is left as it was"


def test_tools_have_their_fields_in_one_order() -> None:
    tool = {"function": {"parameters": {"b": 1, "a": 2}, "strict": True, "name": "f"}}
    found = template_tools([tool])
    assert found is not None
    (made,) = found
    assert list(made) == ["type", "function"]
    assert list(made["function"].items()) == [
        ("name", "f"),
        ("description", None),
        ("parameters", {"b": 1, "a": 2}),
        ("strict", True),
    ]
    assert template_tools([]) is None
    assert template_tools(None) is None


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0]"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": ["a", {"type": "text"}]}], "messages[0].content[1]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_messages_that_cannot_be(messages: Any, field: str) -> None:
    with pytest.raises(Refused) as refused:
        conversation(messages, wants_parts=False)
    assert refused.value.field == field


@pytest.mark.parametrize("tools", [[1], [{"type": "function"}], [{"function": {}}], "tools", {"a": 1}])
def test_tools_that_cannot_be(tools: Any) -> None:
    with pytest.raises(Refused):
        template_tools(tools)


def test_variables_of_a_template() -> None:
    assert template_variables(TEMPLATE) == {"tools", "messages", "add_generation_prompt", "mood"}
