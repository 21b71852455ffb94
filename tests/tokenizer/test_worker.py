"""The child's work, called in this process: what is tokenised, and what is refused with which words."""

from __future__ import annotations

import array
import io
import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from app.tokenizer.prompts import LENGTH, Answer, Fault, Job, Prompt
from app.tokenizer.worker import Worker, serve
from tests.tokenizers import PARTS_TEMPLATE, save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return save_tokenizer(folder)


@pytest.fixture(scope="module")
def worker(tokenizer: Tokenizer) -> Worker:
    return Worker(tokenizers_max=2)


def ask(worker: Worker, folder: Path | str, tokens_max: int = 1_000, **prompt: Any) -> Answer:
    raw: dict[str, Any] = {
        name: json.dumps(value).encode()
        if name in ("text", "messages", "tools", "template_arguments")
        else value
        for name, value in prompt.items()
    }
    return worker.answer(Job(str(folder), tokens_max, Prompt("json", **raw)))


def ids(answer: Answer) -> list[int]:
    assert answer.fault is None, answer.detail
    return array.array("I", answer.token_ids).tolist()


def test_text_has_its_special_tokens(worker: Worker, folder: Path, tokenizer: Tokenizer) -> None:
    expected = tokenizer.encode("the cat sat").ids
    assert tokenizer.id_to_token(expected[0]) == "<s>"
    assert ids(ask(worker, folder, text="the cat sat")) == expected
    assert ids(ask(worker, folder, text="the cat sat", add_special_tokens=False)) == expected[1:]


def test_chat_is_the_template_without_special_tokens(
    worker: Worker, folder: Path, tokenizer: Tokenizer
) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
    ]
    opened = "<turn>user hi</s><turn>assistant yes</s><turn>assistant "
    expected = tokenizer.encode(opened, add_special_tokens=False).ids
    assert tokenizer.id_to_token(expected[0]) == "<turn>"
    assert ids(ask(worker, folder, messages=messages)) == expected
    closed = tokenizer.encode(opened.removesuffix("<turn>assistant "), add_special_tokens=False).ids
    assert ids(ask(worker, folder, messages=messages, add_generation_prompt=False)) == closed


def test_last_message_is_continued(worker: Worker, folder: Path, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well then"}]
    asked: dict[str, Any] = {
        "messages": messages,
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    expected = tokenizer.encode("<turn>user hi</s><turn>assistant well then", add_special_tokens=False).ids
    assert ids(ask(worker, folder, **asked)) == expected


def test_tools_calls_and_variables_reach_the_template(
    worker: Worker, folder: Path, tokenizer: Tokenizer
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"place": "Oslo"}'}}
    answer = ask(
        worker,
        folder,
        messages=[{"role": "assistant", "content": None, "tool_calls": [call]}],
        tools=[{"type": "function", "function": {"name": "now"}}],
        template_arguments={"mood": "calm", "unknown": 1},
    )
    tools = '[{"type": "function", "function": {"name": "now", "description": null, "parameters": null}}]'
    rendered = f"<turn>tools {tools}</s><turn>assistant  now=Oslo</s><turn>assistant calm "
    assert ids(answer) == tokenizer.encode(rendered, add_special_tokens=False).ids


def test_parts_go_to_a_template_that_wants_them(worker: Worker, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, PARTS_TEMPLATE)
    expected = tokenizer.encode("<turn>user[hi]</s>", add_special_tokens=False).ids
    assert ids(ask(worker, tmp_path, messages=[{"role": "user", "content": "hi"}])) == expected


def test_least_recently_used_tokenizer_goes(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        save_tokenizer(folder)
    worker = Worker(tokenizers_max=2)
    order = [0, 1, 0, 2, 0, 1]
    answers = [ask(worker, folders[number], text="x") for number in order]
    assert [(answer.loaded, answer.evicted) for answer in answers] == [
        (1, 0), (1, 0), (0, 0), (1, 1), (0, 0), (1, 1)
    ]  # fmt: skip


def test_template_that_is_missing(worker: Worker, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, None)
    answer = ask(worker, tmp_path, messages=[{"role": "user", "content": "hi"}])
    assert (answer.fault, answer.field) == (Fault.REFUSED, "messages")
    assert "add chat_template.jinja" in answer.detail
    assert ask(worker, tmp_path, text="hi").fault is None


def test_code_of_a_tokenizer_is_never_run(worker: Worker, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, remote_code=True)
    answer = ask(worker, tmp_path, text="hi")
    assert answer.fault is Fault.UNUSABLE
    assert "never run" in answer.detail


@pytest.mark.parametrize("make", [lambda _folder: None, lambda folder: folder.mkdir()])
def test_folder_without_a_tokenizer(worker: Worker, tmp_path: Path, make: Any) -> None:
    make(tmp_path / "empty")
    answer = ask(worker, tmp_path / "empty", text="hi")
    assert answer.fault is Fault.UNUSABLE
    assert "KVINDEXER_TOKENIZERS" in answer.detail


@pytest.mark.parametrize("source", ["../secret", "a/b/c", "-x", "x" * 300])
def test_name_that_no_repository_can_have(worker: Worker, source: str) -> None:
    answer = ask(worker, source, text="hi")
    assert (answer.fault, answer.token_ids) == (Fault.UNUSABLE, b"")


def test_too_many_tokens(worker: Worker, folder: Path) -> None:
    assert ask(worker, folder, tokens_max=3, text="q" * 2).fault is None
    assert ask(worker, folder, tokens_max=3, text="q z q z").fault is Fault.TOO_LONG


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"text": 7}, "text"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": "x"}, "tools"),
        ({"messages": [{"role": "user", "content": "a"}], "template_arguments": []}, None),
        ({"messages": [{"role": "user", "content": "a"}], "template_arguments": [1]}, "chat_template_kwargs"),
        (
            {
                "messages": [{"role": "user", "content": "a"}],
                "template_arguments": {"chat_template": "{{ 1 }}"},
            },
            "chat_template_kwargs",
        ),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [7]}]}, "messages"),
        (
            {
                "messages": [{"role": "u", "content": "a"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "messages",
        ),
    ],
)
def test_prompt_that_cannot_be(
    worker: Worker, folder: Path, prompt: dict[str, Any], field: str | None
) -> None:
    answer = ask(worker, folder, **prompt)
    assert (answer.fault, answer.field) == ((Fault.REFUSED, field) if field else (None, ""))


def test_bytes_that_cannot_be_read(worker: Worker, folder: Path) -> None:
    for notation, text in (("json", b'"\\ud800"'), ("json", b'"a'), ("msgpack", b"\xd9\xff")):
        answer = worker.answer(Job(str(folder), 10, Prompt(notation, text=text)))
        assert (answer.fault, answer.field) == (Fault.REFUSED, "text")


def test_msgpack(worker: Worker, folder: Path, tokenizer: Tokenizer) -> None:
    answer = worker.answer(Job(str(folder), 10, Prompt("msgpack", text=msgspec.msgpack.encode("the cat"))))
    assert ids(answer) == tokenizer.encode("the cat").ids


def test_frames(worker: Worker, folder: Path, tokenizer: Tokenizer) -> None:
    def frame(text: str) -> bytes:
        job = msgspec.msgpack.encode(Job(str(folder), 99, Prompt("json", text=json.dumps(text).encode())))
        return struct.pack("<I", len(job)) + job

    answers = io.BytesIO()
    serve(worker, io.BytesIO(frame("the cat") + frame("a hat") + b"\x01"), answers)
    stream = answers.getvalue()
    for text in ("the cat", "a hat"):
        (length,) = LENGTH.unpack(stream[:4])
        payload, stream = stream[4 : 4 + length], stream[4 + length :]
        assert ids(msgspec.msgpack.decode(payload, type=Answer)) == tokenizer.encode(text).ids
    assert stream == b""
