"""Real child processes: one for every model, caches and bounds, and what is said when a tokenizer cannot be had."""

from __future__ import annotations

import array
import asyncio
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer

from app.config import load_settings
from app.errors import InvalidInput, InvalidSettings, LimitExceeded, Overloaded, TokenizerUnavailable
from app.tokenizer.front import CACHED_BYTES_MAX, Tokenizer
from app.tokenizer.process import TokenizerProcess
from app.tokenizer.prompts import Job, Prompt
from tests.tokenizers import save_tokenizer

Try = Callable[[Tokenizer], Awaitable[None]]


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def plain(folder: Path) -> RustTokenizer:
    return save_tokenizer(folder)


def text(words: str) -> Prompt:
    return Prompt("json", text=json.dumps(words).encode())


@asynccontextmanager
async def opened(
    *, serves: str | None = None, clock: Clock | None = None, **settings: Any
) -> AsyncIterator[Tokenizer]:
    tokenizer = Tokenizer(
        load_settings(**settings), serves=lambda model: model == serves, clock=clock or Clock()
    )
    try:
        yield tokenizer
    finally:
        await tokenizer.close()


def run(attempt: Try, **options: Any) -> None:
    async def inside() -> None:
        async with opened(**options) as tokenizer:
            await attempt(tokenizer)

    asyncio.run(inside())


def test_prompt_that_comes_again_is_not_tokenised_again(folder: Path, plain: RustTokenizer) -> None:
    async def attempt(tokenizer: Tokenizer) -> None:
        expected = array.array("I", plain.encode("the cat").ids).tobytes()
        for _ in range(3):
            assert await tokenizer.token_ids("m", text("the cat")) == expected
        assert await tokenizer.token_ids("m", text("a hat")) != expected
        counts = tokenizer.counters()
        assert (counts["cache_hits"], counts["cache_misses"], counts["starts"]) == (2, 2, 1)
        assert tokenizer.gauges()["cache_entries"] == 2

    run(attempt, tokenizers=f"m={folder}")


def test_what_differs_in_anything_is_another_prompt(folder: Path, plain: RustTokenizer) -> None:
    async def attempt(tokenizer: Tokenizer) -> None:
        messages = b'[{"role":"user","content":"hi"}]'
        prompts = [
            Prompt("json", messages=messages),
            Prompt("json", messages=messages, add_generation_prompt=False),
            Prompt("json", messages=messages, tools=b'[{"function":{"name":"f"}}]'),
            Prompt("json", messages=messages, template_arguments=b'{"mood":"calm"}'),
            Prompt("json", messages=messages, add_special_tokens=True),
        ]
        made = [await tokenizer.token_ids("m", prompt) for prompt in prompts for _ in range(2)]
        assert made[::2] == made[1::2]
        assert len(set(made)) == len(prompts)

    run(attempt, tokenizers=f"m={folder}")


def test_equal_prompts_at_once_are_tokenised_once(folder: Path, plain: RustTokenizer) -> None:
    async def attempt(tokenizer: Tokenizer) -> None:
        made = await asyncio.gather(*(tokenizer.token_ids("m", text("the cat")) for _ in range(20)))
        assert len(set(made)) == 1
        assert tokenizer.counters()["cache_misses"] == 1

    # Twenty callers, and room for one prompt.
    run(attempt, tokenizers=f"m={folder}", tokenizer_queue_max=1)


def test_caller_that_leaves_takes_nothing_from_the_others(folder: Path, plain: RustTokenizer) -> None:
    async def attempt(tokenizer: Tokenizer) -> None:
        first = asyncio.create_task(tokenizer.token_ids("m", text("the cat")))
        second = asyncio.create_task(tokenizer.token_ids("m", text("the cat")))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == array.array("I", plain.encode("the cat").ids).tobytes()
        assert tokenizer.counters()["cache_misses"] == 1

    run(attempt, tokenizers=f"m={folder}")


def test_two_processes_share_the_work(folder: Path, plain: RustTokenizer) -> None:
    async def attempt(tokenizer: Tokenizer) -> None:
        words = [f"the cat {number}" for number in range(12)]
        made = await asyncio.gather(*(tokenizer.token_ids("m", text(word)) for word in words))
        assert made == [array.array("I", plain.encode(word).ids).tobytes() for word in words]
        assert tokenizer.counters()["starts"] == 2

    run(attempt, tokenizers=f"m={folder}", tokenizer_processes=2)


def test_cache_is_bounded(folder: Path, plain: RustTokenizer) -> None:
    async def attempt(tokenizer: Tokenizer) -> None:
        for word in ("the cat", "a hat", "the cat", "that mat", "the cat"):
            await tokenizer.token_ids("m", text(word))
        counts = tokenizer.counters()
        assert (counts["cache_hits"], counts["cache_evictions"]) == (2, 1)
        assert tokenizer.gauges()["cache_bytes"] <= 480

    run(attempt, tokenizers=f"m={folder}", tokenizer_cache_bytes_max=480)


def test_long_prompt_is_answered_and_not_kept(folder: Path, plain: RustTokenizer) -> None:
    async def attempt(tokenizer: Tokenizer) -> None:
        words = "the " * (CACHED_BYTES_MAX // 4 + 1)
        for _ in range(2):
            made = await tokenizer.token_ids("m", text(words))
            assert len(made) // 4 == len(plain.encode(words).ids)
        assert tokenizer.gauges()["cache_entries"] == 0

    run(attempt, tokenizers=f"m={folder}")


def test_queue_is_bounded(folder: Path, plain: RustTokenizer) -> None:
    async def attempt(tokenizer: Tokenizer) -> None:
        first = asyncio.create_task(tokenizer.token_ids("m", text("the cat")))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="tokenizer_queue_max"):
            await tokenizer.token_ids("m", text("a hat"))
        await first
        await tokenizer.token_ids("m", text("a hat"))
        assert tokenizer.counters()["refused"] == 1

    run(attempt, tokenizers=f"m={folder}", tokenizer_queue_max=1)


def test_too_many_tokens(folder: Path, plain: RustTokenizer) -> None:
    async def attempt(tokenizer: Tokenizer) -> None:
        with pytest.raises(LimitExceeded, match="tokens_max = 4") as caught:
            await tokenizer.token_ids("m", text("q z q z q z"))
        assert caught.value.bound == "tokens_max"

    run(attempt, tokenizers=f"m={folder}", tokens_max=4)


# -- models


def test_model_that_nobody_serves_is_looked_up_nowhere(folder: Path, plain: RustTokenizer) -> None:
    async def attempt(tokenizer: Tokenizer) -> None:
        for model in (str(folder), "other"):
            with pytest.raises(InvalidInput, match="KVINDEXER_TOKENIZERS") as caught:
                await tokenizer.token_ids(model, text("a"))
            assert caught.value.field == "model"
        assert tokenizer.counters()["starts"] == 0

    run(attempt, tokenizers=f"m={folder}")
    run(attempt, serves=str(folder), tokenizer_hub=False)


def test_served_model_that_is_a_folder(folder: Path, plain: RustTokenizer) -> None:
    async def attempt(tokenizer: Tokenizer) -> None:
        assert await tokenizer.token_ids(str(folder), text("a"))

    run(attempt, serves=str(folder))


def test_folder_that_comes_later_is_found_after_a_while(tmp_path: Path) -> None:
    clock = Clock()

    async def attempt(tokenizer: Tokenizer) -> None:
        with pytest.raises(InvalidInput, match="no folder"):
            await tokenizer.token_ids("m", text("a"))
        save_tokenizer(tmp_path / "later")
        clock.now_s += 9
        with pytest.raises(InvalidInput, match="no folder"):
            await tokenizer.token_ids("m", text("a"))
        assert tokenizer.counters()["failures"] == 1
        clock.now_s += 1
        assert await tokenizer.token_ids("m", text("a"))

    run(attempt, clock=clock, tokenizers=f"m={tmp_path / 'later'}", tokenizer_retry_s=10)


@pytest.mark.parametrize("value", ["m", "m=", "=x", "m=a,m=b"])
def test_settings_that_cannot_be(value: str) -> None:
    with pytest.raises(InvalidSettings, match="tokenizers"):
        load_settings(tokenizers=value)


def test_sources_of_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVINDEXER_TOKENIZERS", "a=/x/y, b = org/name ,c=./z=1")
    assert load_settings().tokenizer_sources() == {"a": "/x/y", "b": "org/name", "c": f"{tmp_path}/z=1"}


# -- the hub


class Hub(http.server.BaseHTTPRequestHandler):
    status = 404
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Nothing: a test says what it saw."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Hub]]:
    class OneHub(Hub):
        asked: list[str] = []

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OneHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    _at_hub(monkeypatch, tmp_path, server.server_address[1])
    yield OneHub
    server.shutdown()
    thread.join()
    server.server_close()


def _at_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, port: int) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for name in (
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "HTTP_PROXY",
        "http_proxy",
        "ALL_PROXY",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("status", "error"), [(404, InvalidInput), (401, InvalidInput), (502, TokenizerUnavailable)]
)
def test_hub_that_has_it_not(hub: type[Hub], status: int, error: type[Exception]) -> None:
    hub.status = status

    async def attempt(tokenizer: Tokenizer) -> None:
        for _ in range(2):
            with pytest.raises(error, match=f"(?s){status}.*KVINDEXER_TOKENIZERS"):
                await tokenizer.token_ids("org/name", text("a"))

    run(attempt, serves="org/name")
    about_models = [path for path in hub.asked if path.startswith("/api/models")]
    assert about_models == ["/api/models/org/name"], "asked once"


def test_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound and never listened on: nobody can be reached there
        taken.bind(("127.0.0.1", 0))
        _at_hub(monkeypatch, tmp_path, taken.getsockname()[1])

        async def attempt(tokenizer: Tokenizer) -> None:
            with pytest.raises(TokenizerUnavailable, match=r"(?s)cannot be reached.*KVINDEXER_TOKENIZERS"):
                await tokenizer.token_ids("m", text("a"))

        run(attempt, tokenizers="m=org/name")


# -- processes


def test_child_that_ends_is_started_again(folder: Path, plain: RustTokenizer) -> None:
    async def attempt() -> None:
        process = TokenizerProcess(tokenizers_max=1, timeout_s=60)
        job = Job(str(folder), 100, text("the cat"))
        expected = (await process.ask(job)).token_ids
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(TokenizerUnavailable, match="ended"):
            await process.ask(job)
        assert (await process.ask(job)).token_ids == expected
        assert process.starts == 2
        await process.close()
        await process.close()

    asyncio.run(attempt())


def test_prompt_that_takes_too_long_ends_its_child(folder: Path, plain: RustTokenizer) -> None:
    async def attempt(tokenizer: Tokenizer) -> None:
        with pytest.raises(TokenizerUnavailable, match="tokenizer_timeout_s"):
            await tokenizer.token_ids("m", text("the cat"))
        assert tokenizer._processes[0].pid is None

    run(attempt, tokenizers=f"m={folder}", tokenizer_timeout_s=0.01)


def test_child_ends_with_its_service(folder: Path, plain: RustTokenizer) -> None:
    """However the service ends: here the pipe is all that closes."""
    child = subprocess.Popen(
        [sys.executable, "-m", "app.tokenizer.worker", "1", "info", "console"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        answers, _ = child.communicate(timeout=60)
    finally:
        child.kill()
    assert (child.returncode, answers) == (0, b"")


def test_service_does_without_transformers_until_asked() -> None:
    program = (
        "import sys\n"
        "from app.config import load_settings\n"
        "from app.main import create_app\n"
        "import app.serving.serving\n"
        "create_app(load_settings(tokenizers='m=org/name'))\n"
        "print(sorted({'transformers', 'tokenizers', 'jinja2', 'huggingface_hub'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
