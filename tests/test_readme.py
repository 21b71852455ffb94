"""What the README shows is what happens: its commands are run as they stand, on ports that are free here."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.config import Settings, variable
from tests.deploy.test_deployment import free_port
from tests.serving.test_serving import DEADLINE_S, ROOT, finished, serving, start
from tests.test_operations_page import shown

PAGE = (ROOT / "README.md").read_text()


def section(heading: str) -> str:
    return PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def blocks(heading: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", section(heading), re.DOTALL | re.MULTILINE)


def run(block: str, ports: dict[str, int]) -> str:
    """What a shell prints for it. The indexer, where a command asks one, is at the port written as 8080."""
    if shutil.which("curl") is None:
        if os.environ.get("CI"):
            pytest.fail("curl is not installed")
        pytest.skip("curl is not installed")
    for written, port in ports.items():
        block = re.sub(rf"\b{written}\b", str(port), block)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f'kvindexer() {{ "{sys.executable}" -m app "$@"; }}\n{block}'],
        cwd=ROOT,
        env={**os.environ, "KVINDEXER_URL": f"http://127.0.0.1:{ports['8080']}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving("serve", "--port", "0") as (_, port):
        yield port


def test_version_is_the_one_that_is_shown() -> None:
    code, out, _ = finished("--version")
    assert (code, f"# {out.strip()} listens on http://127.0.0.1:8080") == (
        0,
        f"# {out.strip()} listens on http://127.0.0.1:{Settings.model_fields['port'].default}",
    )
    assert f"# {out.strip()} listens on http://127.0.0.1:8080" in blocks("In a minute", "sh")[0]


def test_in_a_minute(port: int) -> None:
    install, ask = blocks("In a minute", "sh")
    assert [line.split("#")[0].strip() for line in install.splitlines()] == [
        "python3 -m venv .venv && . .venv/bin/activate",
        "pip install .",
        "kvindexer serve",
    ]
    told, _, answer = run(ask, {"8080": port}).partition("}{")
    assert json.loads(told + "}")["stored_blocks"] == 2
    [expected] = map(json.loads, blocks("In a minute", "json"))
    found = json.loads("{" + answer)
    for document in (expected, found):
        assert document["matches"][0].pop("last_event_age_s") >= 0
    assert found == expected


@pytest.fixture
def engine(port: int) -> Iterator[dict[str, int]]:
    """The simulated engine of the section, and the ports that its commands go to."""
    simulate = blocks("Your own engine", "sh")[1].split()
    ports: dict[str, int] = {
        "8080": port,
        "8000": int(free_port()),
        "5557": int(free_port()),
        "5558": int(free_port()),
    }
    process = start(*(str(ports.get(word, word)) for word in simulate[1:]))
    try:
        until(lambda: answers(f"http://127.0.0.1:{ports['8000']}/health"), "the engine answers")
        yield ports
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE_S)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


def test_an_engine_that_is_registered_and_its_first_match(port: int, engine: dict[str, int]) -> None:
    """The prediction, in tokens, is what the engine then says that it reused."""
    commands = blocks("Your own engine", "sh")[2]
    # A person is slower than an event; a shell may not be.
    before, asked = commands.split("kvindexer match", 1)
    first = run(before, engine)
    assert '"cached_tokens":0' in first
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        until(lambda: http.get("/v1/pods/my-pod").json()["ranks"][0]["last_seq"] == 0, "its event came")
        ids = [*range(1001, 1041)]
        [row] = http.post("/v1/match", json={"model": "my-model", "token_ids": ids}).json()["matches"]
        assert (row["pod"], row["reusable_tokens"]) == ("my-pod", 32)
    prompt = "".join(line + "\n" for line in before.splitlines() if re.match(r"(prompt|body)=", line))
    second = run(prompt + "kvindexer match" + asked, engine)
    assert re.search(r"my-pod\b.*\b32\b", second)
    assert '"cached_tokens":32' in second
    assert "32 with blocks of 16" in section("Your own engine")
    assert '`"cached_tokens":32`' in section("Your own engine")


def test_the_engine_of_the_page_publishes_where_it_is_registered() -> None:
    real, simulated, commands = blocks("Your own engine", "sh")
    found = re.search(r"'({.*})'", real)
    assert found is not None
    config = json.loads(found[1])
    for key, option in (("endpoint", "--zmq"), ("replay_endpoint", "--replay")):
        number = config[key].rpartition(":")[2]
        assert f"{option}-port {number}" in simulated
        assert f"{option} tcp://127.0.0.1:{number}" in commands
    for word in ("my-model", "--port 8000"):
        assert word in real
        assert word in simulated


def test_client_snippet(port: int) -> None:
    [code] = blocks("A router in front of your pods", "python")
    defined: dict[str, Any] = {"my_own_choice": lambda: "nobody knows"}
    exec(code.replace("http://127.0.0.1:8080", f"http://127.0.0.1:{port}"), defined)
    httpx.put(f"http://127.0.0.1:{port}/v1/pods/pod-a", json={"model": "my-model"}).raise_for_status()
    assert asyncio.run(defined["choose"]([1, 2, 3])) == "pod-a", "the only one that there is"
    nowhere: dict[str, Any] = {"my_own_choice": lambda: "nobody knows"}
    exec(code.replace("http://127.0.0.1:8080", f"http://127.0.0.1:{free_port()}"), nowhere)
    assert asyncio.run(nowhere["choose"]([1, 2, 3])) == "nobody knows"


def test_settings_are_those_that_there_are() -> None:
    names = {variable(name): field for name, field in Settings.model_fields.items()}
    rows = re.findall(r"^\| (`KVINDEXER_[^|]*) \| ([^|]*) \|", section("Settings"), re.MULTILINE)
    assert len(rows) > 5
    for listed, defaults in rows:
        for name, default in zip(listed.split(", "), defaults.split(", "), strict=True):
            assert default == shown(names[name.strip("`")].default), name


def test_capture_table_is_of_captures_that_are_here() -> None:
    rows = re.findall(r"^\| `([^`]*)` \| (\d+) \|", section("How exactness is measured"), re.MULTILINE)
    assert rows
    for capture, _ in rows:
        assert (Path(ROOT) / "tests/data/captures" / capture).exists(), capture
