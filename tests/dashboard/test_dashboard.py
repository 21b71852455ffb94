"""The dashboard in a real browser: Debian's chromium against `kvindexer serve` as a process of its own.

DASHBOARD_SCREENSHOTS names a folder for screenshots of every state; without it none are taken.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DEADLINE_MS = 15_000
BLOCK_SIZE = 16
KEY = "a-key-for-the-dashboard"
BLOCKS = 12
PROMPT = random.Random(1).choices(range(32_000), k=BLOCKS * BLOCK_SIZE)


class Indexer:
    """`kvindexer serve`, which can be stopped and started again on the same port."""

    def __init__(self, **settings: str) -> None:
        self.port = 0
        self.settings = settings
        self.process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app", "serve", "--port", str(self.port)],
            env={**os.environ, **self.settings},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        found = re.search(r":(\d+)$", self.process.stdout.readline())
        assert found, "the indexer did not start"
        self.port = int(found[1])

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=30)
        self.process = None

    def post(self, path: str, body: dict[str, object], key: str | None = None) -> None:
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            assert response.status == 200

    def store(
        self, pod: str, blocks: int, *, seq: int = 0, medium: str = "GPU", key: str | None = None
    ) -> None:
        event = {
            "type": "BlockStored",
            "block_hashes": list(range(1, blocks + 1)),
            "parent_block_hash": None,
            "token_ids": PROMPT[: blocks * BLOCK_SIZE],
            "block_size": BLOCK_SIZE,
            "medium": medium,
        }
        body = {"pod": pod, "dp_rank": 0, "model": "m", "seq": seq, "ts": time.time(), "events": [event]}
        self.post("/v1/events", body, key)


@pytest.fixture
def indexer() -> Iterator[Indexer]:
    started = Indexer()
    started.start()
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        if os.environ.get("CI"):
            pytest.fail("chromium is not installed")
        pytest.skip("chromium is not installed")
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS) as launched,
    ):
        yield launched


@pytest.fixture
def page(browser: Browser, indexer: Indexer) -> Iterator[Page]:
    with browser.new_context(viewport={"width": 1280, "height": 1000}) as context:
        opened = context.new_page()
        faults: list[str] = []
        opened.on("pageerror", lambda error: faults.append(str(error)))
        opened.set_default_timeout(DEADLINE_MS)
        opened.goto(indexer.url + "/")
        yield opened
        assert faults == []


def take(page: Page, name: str) -> None:
    if folder := os.environ.get("DASHBOARD_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def ask(page: Page, prompt: str) -> None:
    page.get_by_label("Model").fill("m")
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_role("button", name="Match").click()


def test_pods_appear_and_change_while_the_page_is_open(page: Page, indexer: Indexer) -> None:
    rows = page.locator("#pods tbody tr")
    expect(page.locator("#connection")).to_have_attribute("data-state", "ok")
    expect(rows).to_have_count(0)
    indexer.store("pod-a", 3)
    expect(rows).to_have_count(1, timeout=DEADLINE_MS)
    expect(rows).to_contain_text("3 gpu")
    indexer.store("pod-b", 2, seq=0)
    indexer.store("pod-b", 4, seq=5, medium="CPU")  # batches 1 to 4 never came
    expect(rows).to_have_count(2, timeout=DEADLINE_MS)
    expect(rows.first).to_contain_text("pod-b")  # trouble comes first
    expect(rows.first.locator(".state")).to_have_text("degraded")
    expect(page.locator("#pod-count")).to_contain_text("1 not live")
    take(page, "pods")


def test_live_feed_shows_batches_and_can_be_paused(page: Page, indexer: Indexer) -> None:
    lines = page.locator("#live li")
    expect(page.locator("#live-state")).to_have_text("connected")
    indexer.store("pod-a", 3)
    expect(lines.filter(has_text="batch")).to_contain_text("pod=pod-a")
    seen = lines.count()
    page.get_by_role("button", name="Pause").click()
    indexer.store("pod-b", 2)
    expect(page.locator("#pods tbody tr")).to_have_count(2, timeout=DEADLINE_MS)
    assert lines.count() == seen


def test_playground_draws_block_by_block(page: Page, indexer: Indexer) -> None:
    indexer.store("pod-a", 5)
    indexer.store("pod-b", 2)
    indexer.store("pod-b", BLOCKS, seq=1, medium="CPU")
    ask(page, " ".join(map(str, PROMPT)))
    answer = page.locator("#answer")
    expect(answer).to_contain_text(f"{BLOCKS} full blocks of {BLOCK_SIZE}: 2 sources hold the beginning")
    best, second = answer.locator("tr").all()
    expect(best).to_contain_text("pod-b / 0")
    expect(best.locator("[data-tier=gpu]")).to_have_count(2)
    expect(best.locator("[data-tier=cpu]")).to_have_count(BLOCKS - 2)
    expect(second.locator("[data-tier=gpu]")).to_have_count(5)
    expect(second.locator("i:not([data-tier])")).to_have_count(BLOCKS - 5)
    take(page, "playground")


def test_playground_says_what_is_wrong(page: Page) -> None:
    ask(page, "1 2 three")
    alert = page.locator("#try-error")
    expect(alert).to_contain_text("“three” is not a token id")
    ask(page, "99999999999")
    expect(alert).to_contain_text("token_ids[0]")
    ask(page, "1 2 3")
    expect(alert).to_be_hidden()
    expect(page.locator("#answer")).to_contain_text("nobody holds the first block")


def test_page_says_that_the_indexer_is_away_and_recovers(page: Page, indexer: Indexer) -> None:
    indexer.store("pod-a", 3)
    expect(page.locator("#pods tbody tr")).to_have_count(1, timeout=DEADLINE_MS)
    indexer.stop()
    connection = page.locator("#connection")
    expect(connection).to_have_attribute("data-state", "away", timeout=DEADLINE_MS)
    expect(connection).to_contain_text("does not answer")
    expect(page.locator("#pods tbody tr")).to_have_count(1)  # what it last knew
    take(page, "away")
    indexer.start()
    expect(connection).to_have_attribute("data-state", "ok", timeout=DEADLINE_MS)
    expect(page.locator("#pods tbody tr")).to_have_count(0)


def test_page_asks_for_a_key_and_works_with_it(browser: Browser) -> None:
    """It comes with a 401; the key goes with every call, the live feed included, and never into an address."""
    guarded = Indexer(KVINDEXER_API_KEYS=f"{KEY}:read,{KEY}-of-pods:write")
    guarded.start()
    try:
        with browser.new_context(viewport={"width": 1280, "height": 1000}) as context:
            page = context.new_page()
            addresses: list[str] = []
            page.on("request", lambda request: addresses.append(request.url))
            answer = page.goto(guarded.url + "/")
            assert answer is not None
            assert answer.status == 401
            connection = page.locator("#connection")
            expect(connection).to_have_text("an API key is needed: type it in here")
            take(page, "locked")
            field = page.get_by_label("API key")
            field.fill("another key")
            field.press("Tab")
            expect(connection).to_have_text("this API key is not known", timeout=DEADLINE_MS)
            field.fill(KEY)
            field.press("Tab")
            expect(connection).to_have_attribute("data-state", "ok", timeout=DEADLINE_MS)
            ask(page, "1 2 3")
            expect(page.locator("#answer")).to_contain_text("nobody holds the first block")
            page.reload()
            expect(connection).to_have_attribute("data-state", "ok", timeout=DEADLINE_MS)
            guarded.store("pod-a", 3, key=f"{KEY}-of-pods")
            expect(page.locator("#live li").filter(has_text="batch")).to_contain_text(
                "pod=pod-a", timeout=DEADLINE_MS
            )
            assert not any(KEY in address for address in addresses)
    finally:
        guarded.stop()


@pytest.mark.parametrize(
    ("name", "width", "scheme"), [("desktop", 1280, "light"), ("dark", 1280, "dark"), ("phone", 390, "light")]
)
def test_two_hundred_pods_fit(browser: Browser, indexer: Indexer, name: str, width: int, scheme: str) -> None:
    for number in range(200):
        indexer.store(f"pod-{number:03}", number % BLOCKS + 1)
    with browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme) as context:  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(indexer.url + "/")
        expect(page.locator("#pods tbody tr")).to_have_count(200, timeout=DEADLINE_MS)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            "the page scrolls sideways"
        )
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        page.get_by_label("Find").fill("pod-19")
        expect(page.locator("#pods tbody tr")).to_have_count(10)
        take(page, f"200-pods-{name}")


def test_keyboard_reaches_everything(page: Page) -> None:
    expect(page.locator("#connection")).to_have_attribute("data-state", "ok")
    reached = []
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.name || document.activeElement.textContent.trim()"
            )
        )
    wanted = {
        "Skip to content",
        "api-key",
        "theme",
        "pod-filter",
        "model",
        "lora",
        "cache_salt",
        "kind",
        "prompt",
        "Match",
    }
    assert wanted <= set(reached), reached
