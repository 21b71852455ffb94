"""Text and chat messages in the place of token ids, over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from app.config import load_settings
from app.schemas.match import MatchResponse
from app.schemas.problems import Problem
from tests.api.conftest import Clock, Indexer, stored
from tests.tokenizers import save_tokenizer

PROMPT = "the cat and the hat and the bat sat on that mat, and then the cat sat on the hat"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return save_tokenizer(folder)


@pytest.fixture(scope="module", params=["short", "long"])
def talking(request: pytest.FixtureRequest, folder: Path, tokenizer: Tokenizer) -> Iterator[Indexer]:
    """pod-t holds the text, pod-c the chat, each but for what does not fill a block. Questions change nothing, so one
    tokenizer, which takes a second to start, is asked by all tests."""
    indexer = Indexer(load_settings(tokenizers=f"m={folder}"), Clock(), way=request.param)
    hold(indexer, "pod-t", tokenizer.encode(PROMPT).ids)
    rendered = f"<turn>system be brief</s><turn>user {PROMPT}</s><turn>assistant "
    hold(indexer, "pod-c", tokenizer.encode(rendered, add_special_tokens=False).ids)
    yield indexer
    indexer.close()


def hold(indexer: Indexer, pod: str, ids: list[int]) -> None:
    count = len(ids) // 4
    response = indexer.events(stored(list(range(1, count + 1)), ids[: count * 4]), pod=pod)
    assert response.json()["stored_blocks"] == count, response.text


def ask(indexer: Indexer, **fields: Any) -> Any:
    response = indexer.post("/v1/match", {"model": "m", **fields})
    assert response.status_code == 200, response.text
    MatchResponse.model_validate(response.json(), strict=True)
    return response.json()


def test_text(talking: Indexer, tokenizer: Tokenizer) -> None:
    answer = ask(talking, text=PROMPT)
    assert answer["tokens"] == len(tokenizer.encode(PROMPT).ids)
    assert [(row["pod"], row["matched_blocks"]) for row in answer["matches"]] == [("pod-t", answer["blocks"])]
    assert ask(talking, text=PROMPT, add_special_tokens=False)["tokens"] == answer["tokens"] - 1


def test_chat(talking: Indexer) -> None:
    answer = ask(talking, messages=MESSAGES)
    assert [(row["pod"], row["matched_blocks"]) for row in answer["matches"]] == [("pod-c", answer["blocks"])]
    closed = ask(talking, messages=MESSAGES, add_generation_prompt=False)
    assert closed["tokens"] < answer["tokens"]


def test_tools_and_variables_change_the_prompt(talking: Indexer) -> None:
    plain = ask(talking, messages=MESSAGES)["tokens"]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with_tools = ask(talking, messages=MESSAGES, tools=tools)
    assert with_tools["tokens"] > plain
    assert with_tools["matches"] == []
    assert ask(talking, messages=MESSAGES, chat_template_kwargs={"mood": "calm"})["tokens"] > plain


def test_msgpack(talking: Indexer) -> None:
    headers = {"content-type": "application/msgpack"}
    for fields in ({"text": PROMPT}, {"messages": MESSAGES}):
        body = msgspec.msgpack.encode({"model": "m", **fields})
        response = talking.post("/v1/match", content=body, headers=headers)
        assert response.json() == ask(talking, **fields)


def test_salt_keeps_text_apart(talking: Indexer) -> None:
    assert ask(talking, text=PROMPT, cache_salt="tenant")["matches"] == []


def test_route(talking: Indexer) -> None:
    for fields, pod in (({"text": PROMPT}, "pod-t"), ({"messages": MESSAGES}, "pod-c")):
        answer = talking.post("/v1/route", {"model": "m", **fields}).json()
        assert answer["pod"] == pod


def test_batch(talking: Indexer) -> None:
    queries = [
        {"model": "m", "text": PROMPT},
        {"model": "unknown", "text": PROMPT},
        {"model": "m", "messages": MESSAGES},
    ]
    results = talking.post("/v1/match/batch", {"queries": queries}).json()["results"]
    assert results[0] == ask(talking, text=PROMPT)
    assert (results[1]["status"], results[1]["errors"][0]["field"]) == (422, "model")
    assert results[2] == ask(talking, messages=MESSAGES)


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"model": "unknown", "text": "a"}, "model", "KVINDEXER_TOKENIZERS"),
        ({"model": "m", "text": 7}, "text", "string"),
        ({"model": "m", "messages": []}, "messages", "at least one"),
        ({"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0]", "token_ids"),
        ({"model": "m", "messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}},
         "chat_template_kwargs", "chat_template"),
        ({"model": "m", "messages": MESSAGES, "add_generation_prompt": "yes"}, "add_generation_prompt", "boolean"),
    ],
)  # fmt: skip
def test_refused(talking: Indexer, fields: dict[str, Any], field: str, said: str) -> None:
    before = talking.picture()
    for path in ("/v1/match", "/v1/route"):
        response = talking.post(path, fields)
        assert response.status_code == 422, response.text
        (fault,) = Problem.model_validate(response.json(), strict=True).errors
        assert fault.field == field
        assert said in fault.detail
    assert talking.picture() == before


def test_what_cannot_be_had_now_is_503(make_indexer: Callable[..., Indexer], folder: Path) -> None:
    indexer = make_indexer(tokenizers=f"m={folder}", tokenizer_timeout_s=0.001)
    response = indexer.post("/v1/match", {"model": "m", "text": "a"})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["type"].endswith("tokenizer-unavailable")
    assert "tokenizer_timeout_s" in response.json()["detail"]


def test_figures(make_indexer: Callable[..., Indexer], folder: Path, tokenizer: Tokenizer) -> None:
    indexer = make_indexer(tokenizers=f"m={folder}")
    hold(indexer, "pod-t", tokenizer.encode(PROMPT).ids)
    for _ in range(3):
        ask(indexer, text=PROMPT)
    page = indexer.get("/metrics").text
    assert "kvindexer_tokenizer_cache_hits_total 2.0" in page
    assert "kvindexer_tokenizer_cache_misses_total 1.0" in page
    assert "kvindexer_tokenizer_loads_total 1.0" in page


def test_fuzzy_match_of_a_text(talking: Indexer, tokenizer: Tokenizer) -> None:
    """The text from its middle on: no prefix of it is held, and most of it is."""
    part = PROMPT[PROMPT.index("hat") :]
    body = {"model": "m", "text": part, "add_special_tokens": False, "mode": "sliding", "exclude": ["pod-c"]}
    response = talking.post("/v1/fuzzy-match", body)
    assert response.status_code == 200, response.text
    answer = response.json()
    token_ids = tokenizer.encode(part, add_special_tokens=False).ids
    assert answer["tokens"] == len(token_ids)
    by_tokens = {name: value for name, value in body.items() if name not in ("text", "add_special_tokens")}
    assert answer == talking.post("/v1/fuzzy-match", {**by_tokens, "token_ids": token_ids}).json()
    [pod] = answer["pods"]
    assert pod["pod"] == "pod-t"
    assert pod["coverage"] > 0.5
