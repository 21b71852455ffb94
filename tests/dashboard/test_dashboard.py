"""The dashboard in a real browser: Debian's chromium against `kvindexer serve` as a process of its own.

Every state is kept as a picture in build/artifacts/dashboard, for people to look at.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.processes import Process
from tests.serving.test_serving import start

ARTIFACTS = Path(__file__).parent.parent.parent / "build" / "artifacts" / "dashboard"
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

    def __init__(self, **environment: str) -> None:
        self.port = 0
        self.environment = environment
        self.process: Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process = start("serve", "--port", str(self.port), **self.environment)
        found = re.search(r":(\d+)$", self.process.stdout.readline())
        assert found, "the indexer did not start"
        self.port = int(found[1])

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.terminate()
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
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=ARTIFACTS / f"{name}.png", full_page=True)


def ask(page: Page, prompt: str) -> None:
    page.get_by_label("Model").fill("m")
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_role("button", name="Look it up").click()


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
    expect(rows.first.locator(".trouble")).to_have_text("batches 1 to 4 never came; 1 gaps")
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
    best, second = answer.locator(".grid tr").all()
    expect(best).to_contain_text("pod-b / 0")
    expect(best.locator("[data-tier=gpu]")).to_have_count(2)
    expect(best.locator("[data-tier=cpu]")).to_have_count(BLOCKS - 2)
    expect(second.locator("[data-tier=gpu]")).to_have_count(5)
    expect(second.locator("i:not([data-tier])")).to_have_count(BLOCKS - 5)
    take(page, "playground")


def test_playground_says_where_the_prompt_would_go_and_why(page: Page, indexer: Indexer) -> None:
    indexer.store("pod-a", 5)
    indexer.store("pod-b", BLOCKS)
    indexer.store("pod-b", 2, seq=4)  # a gap
    ask(page, " ".join(map(str, PROMPT)))
    answer = page.locator("#answer")
    expect(answer).to_contain_text("pod-b / 0 by prefix_and_load, score")
    rows = page.locator("#candidates tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_have_class("chosen")
    expect(rows.first).to_contain_text("degraded")
    expect(rows.first).to_contain_text(f"holds {BLOCKS * BLOCK_SIZE} of {BLOCKS * BLOCK_SIZE} tokens")
    expect(rows.last).to_contain_text("not known")
    page.get_by_label("Policy").select_option("least_loaded")
    page.get_by_role("button", name="Look it up").click()
    expect(answer).to_contain_text("by least_loaded")
    # Looking is no choice: nothing of it is counted or announced.
    text = urllib.request.urlopen(indexer.url + "/metrics", timeout=30).read().decode()
    assert "kvindexer_route_choices_prefix_and_load_total 0.0" in text
    assert "kvindexer_index_speculative_blocks 0.0" in text


def test_playground_finds_what_has_another_beginning(page: Page, indexer: Indexer) -> None:
    indexer.store("pod-a", BLOCKS)
    other = [1, 2, 3, *PROMPT[BLOCK_SIZE : 5 * BLOCK_SIZE]]
    ask(page, " ".join(map(str, other)))
    answer = page.locator("#answer")
    expect(answer).to_contain_text("nobody holds the first block")
    expect(answer).to_contain_text(f"{4 * BLOCK_SIZE} of {len(other)} tokens exactly, 0 nearly")
    expect(answer.locator(".places i")).to_have_count(1)
    expect(answer.locator(".places i")).to_have_attribute("title", f"exact: tokens 3 to {len(other)}")
    row = page.locator("#fuzzy tbody tr")
    expect(row).to_contain_text("pod-a")
    expect(row).to_contain_text(str(4 * BLOCK_SIZE))
    take(page, "playground-fuzzy")


def test_playground_goes_on_without_fuzzy_matches(browser: Browser) -> None:
    indexer = Indexer(KVINDEXER_FUZZY="false")
    indexer.start()
    try:
        with browser.new_context() as context:
            page = context.new_page()
            page.goto(indexer.url + "/")
            indexer.store("pod-a", 2)
            ask(page, " ".join(map(str, PROMPT)))
            expect(page.locator("#answer")).to_contain_text("1 sources hold the beginning")
            expect(page.locator("#answer")).to_contain_text("KVINDEXER_FUZZY")
            expect(page.locator("#candidates tbody tr")).to_have_count(1)
    finally:
        indexer.stop()


def test_playground_says_what_is_wrong(page: Page) -> None:
    ask(page, "1 2 three")
    alert = page.locator("#try-error")
    expect(alert).to_contain_text("“three” is not a token id")
    ask(page, "99999999999")
    expect(alert).to_contain_text("token_ids[0]")
    ask(page, "1 2 3")
    expect(alert).to_be_hidden()
    answer = page.locator("#answer")
    expect(answer).to_contain_text("nobody holds the first block")
    expect(answer).to_contain_text("none of the registered pods serves")
    expect(answer).to_contain_text("No block of it, not even nearly.")


def test_page_says_that_the_indexer_is_away_and_recovers(page: Page, indexer: Indexer) -> None:
    indexer.store("pod-a", 3)
    expect(page.locator("#pods tbody tr")).to_have_count(1, timeout=DEADLINE_MS)
    indexer.stop()
    connection = page.locator("#connection")
    expect(connection).to_have_attribute("data-state", "away", timeout=DEADLINE_MS)
    expect(connection).to_contain_text("does not answer")
    expect(page.locator("#pods tbody tr")).to_have_count(1)  # what it last knew
    ask(page, "1 2 3")
    expect(page.locator("#try-error")).to_have_text("The indexer does not answer.")
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
        ask(page, " ".join(map(str, PROMPT)))
        answer = page.locator("#answer")
        expect(answer).to_contain_text("200 sources hold the beginning, the best 64 are drawn.")
        expect(answer.locator(".grid tr")).to_have_count(64)
        expect(answer.locator("#candidates tbody tr")).to_have_count(64)
        expect(answer.locator("#fuzzy tbody tr")).to_have_count(64)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the answer does"
        take(page, f"200-pods-{name}")
        page.get_by_label("Find").fill("pod-19")
        expect(page.locator("#pods tbody tr")).to_have_count(10)


@pytest.mark.parametrize(("name", "width", "scheme"), [("phone", 390, "light"), ("dark", 1280, "dark")])
def test_a_whole_page_fits(browser: Browser, indexer: Indexer, name: str, width: int, scheme: str) -> None:
    """With an answer in the playground, charts that have moved, and sources in every state but `down`."""
    for number in range(6):
        indexer.store(f"pod-{number}", 2 * number + 1)
    indexer.store("pod-3", 9, seq=1, medium="CPU")
    indexer.store("pod-5", 12, seq=7)
    with browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme) as context:  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(indexer.url + "/")
        moved = page.locator("#charts figure", has_text="Matches, a second").locator("path[d*=L]")
        ask(page, " ".join(map(str, PROMPT[BLOCK_SIZE // 2 :] + PROMPT)))
        expect(page.locator("#answer")).to_contain_text("nobody holds the first block")
        ask(page, " ".join(map(str, PROMPT)))
        expect(page.locator("#answer .grid tr")).to_have_count(6)
        expect(moved).to_have_count(1, timeout=DEADLINE_MS)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            "the page scrolls sideways"
        )
        take(page, f"whole-{name}")


def test_keyboard_is_enough_to_look_up_a_prompt(page: Page, indexer: Indexer) -> None:
    indexer.store("pod-a", 2)
    expect(page.locator("#pods tbody tr")).to_have_count(1, timeout=DEADLINE_MS)
    press_until(page, "model")
    page.keyboard.press("Control+a")
    page.keyboard.type("m")
    press_until(page, "policy")
    page.keyboard.press("ArrowDown")
    press_until(page, "prompt")
    page.keyboard.type(" ".join(map(str, PROMPT[:40])))
    press_until(page, "Look it up")
    page.keyboard.press("Enter")
    expect(page.locator("#answer")).to_contain_text("pod-a / 0 by longest_prefix")
    press_until(page, "Blocks by source")
    press_until(page, "Candidates")
    press_until(page, "Reusable tokens by pod")


def focused(page: Page) -> str:
    return str(
        page.evaluate(
            "(e => e.id || e.name || e.getAttribute('aria-label') || e.textContent.trim())(document.activeElement)"
        )
    )


def press_until(page: Page, wanted: str) -> None:
    for _ in range(30):
        page.keyboard.press("Tab")
        if focused(page) == wanted:
            return
    raise AssertionError(f"no Tab reaches {wanted}")


def test_keyboard_reaches_everything(page: Page) -> None:
    expect(page.locator("#connection")).to_have_attribute("data-state", "ok")
    reached = []
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.append(focused(page))
    wanted = {
        "Skip to content",
        "api-key",
        "theme",
        "pod-filter",
        "model",
        "lora",
        "cache_salt",
        "kind",
        "policy",
        "prompt",
        "Look it up",
    }
    assert wanted <= set(reached), reached
