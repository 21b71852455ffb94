"""What text costs: a chat of about 4,000 tokens asked for over HTTP, cached and not, and what the loop feels of it.

    python -m benchmarks.tokenizer [--folder a/model/with/tokenizer.json]

The application runs on uvloop in this process, over a real socket, with the client on the same loop. A task on it
sleeps 1 ms again and again, and notes by how much it woke late and how much CPU the loop's thread used in between.
The second is what the loop was held by work (ours, the server's and the client's together); the first has in it
too how long the machine had no core for us, which the line with nothing to do shows. Without `--folder` a
tokenizer is trained here on random words. Checked on the way: token ids are those of the tokenizer itself, and no
work holds the loop for more than 5 ms.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import uvicorn
import uvloop
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from app.config import load_settings
from app.main import create_app
from benchmarks.measure import print_line, print_machine

MODEL = "m"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TURNS = 16
HELD_MS_MAX = 5.0


def words(seed: int, count: int) -> list[str]:
    source = random.Random(seed)
    return ["".join(source.choices("etaoinshrdlu", k=source.randint(2, 7))) for _ in range(count)]


VOCABULARY = words(0, 3_000)


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=8_000,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(VOCABULARY)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def chat(seed: int, count: int) -> list[dict[str, str]]:
    source = random.Random(seed)
    share = count // TURNS
    return [
        {
            "role": "user" if turn % 2 == 0 else "assistant",
            "content": " ".join(source.choices(VOCABULARY, k=share)),
        }
        for turn in range(TURNS)
    ]


def expected_tokens(folder: Path, messages: list[dict[str, str]]) -> int:
    """By transformers itself, in this process; only called when everything has been measured."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return len(array.array("I", tokenizer.encode(rendered, add_special_tokens=False)))


class Lateness:
    """How late a task that sleeps 1 ms wakes, and the CPU time of the thread meanwhile, in ms."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.held: list[float] = []

    async def watch(self) -> None:
        while True:
            before, used = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            self.seen.append(1e3 * (time.perf_counter() - before) - 1)
            self.held.append(1e3 * (time.thread_time() - used))

    async def during(self, work: Callable[[], Awaitable[None]]) -> str:
        self.seen.clear()
        self.held.clear()
        watcher = asyncio.create_task(self.watch())
        await work()
        watcher.cancel()
        assert max(self.held) <= HELD_MS_MAX, f"the loop was held for {max(self.held):.2f} ms"
        return (
            f"loop held: p99 {quantile(self.held, 0.99):5.2f} max {max(self.held):5.2f} ms   "
            f"late: p99 {quantile(self.seen, 0.99):5.2f} max {max(self.seen):5.2f} ms"
        )


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def measure(port: int, options: argparse.Namespace) -> tuple[list[dict[str, str]], int]:
    lateness = Lateness()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:

        async def ask(body: bytes) -> Any:
            answer = await client.post(
                "/v1/match", content=body, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 200, answer.text
            return answer.json()

        def body(seed: int) -> bytes:
            return json.dumps({"model": MODEL, "messages": chat(seed, options.words)}).encode()

        async def timed(label: str, bodies: list[bytes]) -> None:
            took: list[float] = []

            async def work() -> None:
                for one in bodies:
                    before = time.perf_counter()
                    await ask(one)
                    took.append(1e3 * (time.perf_counter() - before))

            late = await lateness.during(work)
            print_line(
                label, f"p50 {quantile(took, 0.5):7.2f} ms  p99 {quantile(took, 0.99):7.2f} ms   {late}"
            )

        async def idle() -> None:
            await asyncio.sleep(2)

        print_line("nothing to do", await lateness.during(idle))
        bodies = [body(seed) for seed in range(options.prompts)]
        await timed("first prompt: process, library and tokenizer are loaded", [body(-1)])
        await timed("chat, not cached", bodies)
        await timed("chat, cached", bodies)
        prompt = chat(0, options.words)
        return prompt, (await ask(bodies[0]))["tokens"]


async def serve(folder: Path, options: argparse.Namespace) -> tuple[list[dict[str, str]], int]:
    app = create_app(load_settings(tokenizers=f"{MODEL}={folder}"))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", http="httptools"))
    running = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    try:
        return await measure(server.servers[0].sockets[0].getsockname()[1], options)
    finally:
        server.should_exit = True
        await running


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="of a tokenizer with a chat template")
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--words", type=int, default=4_100, help="of a prompt")
    options = parser.parse_args()
    print_machine()
    print(f"settings: {options}")
    with tempfile.TemporaryDirectory() as made:
        folder = (options.folder or Path(made)).absolute()
        if options.folder is None:
            save_tokenizer(folder)
        prompt, tokens = uvloop.run(serve(folder, options))
        assert tokens == expected_tokens(folder, prompt), "the tokens are those of the tokenizer itself"
    print(f"{tokens} tokens a prompt, {len(json.dumps(prompt))} bytes")


if __name__ == "__main__":
    main()
