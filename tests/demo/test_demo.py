"""The demo as it is started: it measures, it says so, and nothing of it is left whenever it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.client import AsyncClient
from app.demo.router import Router
from app.demo.runner import DemoOutcome, DemoSettings, _drive
from app.replay.indexer import own_indexer
from tests.experiment.traces import conversations, write_mooncake

DEADLINE_S = 60.0


def start(*arguments: str) -> subprocess.Popen[str]:
    """In a session of its own, so that all that it starts can be found again."""
    return subprocess.Popen(
        [sys.executable, "-m", "app", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def in_session(session: int) -> list[str]:
    """What still runs of a session, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
    return found


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        output, errors = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert in_session(process.pid) == []
    return output, errors


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None, "the demo is started with a pipe"
    watchdog = threading.Timer(DEADLINE_S, os.killpg, (process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        assert any(word in line for line in process.stdout), f"it ended without saying {word!r}"
    finally:
        watchdog.cancel()


def test_policies_side_by_side_and_the_prefix_wins() -> None:
    process = start("demo", "--seconds", "6", "--pods", "2", "--json")
    output, errors = finish(process)
    assert process.returncode == 0, errors
    said = json.loads(output)
    assert set(said["policies"]) == {"prefix_and_load", "round_robin"}
    assert not said["interrupted"]
    for figures in said["policies"].values():
        assert figures["requests"] > 5
        assert (figures["failed"], figures["routed_alone"]) == (0, 0)
        assert 0 < figures["ttft_p50_s"] <= figures["ttft_p99_s"]
        assert sum(figures["requests_per_pod"].values()) == figures["requests"]
    hit_rates = {policy: figures["hit_rate"] for policy, figures in said["policies"].items()}
    assert hit_rates["prefix_and_load"] > hit_rates["round_robin"] > 0


def test_lines_and_a_summary_without_a_terminal() -> None:
    process = start("demo", "--seconds", "1", "--pods", "1", "--policy", "longest_prefix")
    output, errors = finish(process)
    assert process.returncode == 0, errors
    assert "dashboard http://127.0.0.1:" in output
    assert "longest_prefix: 0 requests" in output
    assert "done; the dashboard was at" in output
    assert "\x1b" not in output


def test_a_trace_is_the_traffic_and_its_end_is_the_end(tmp_path: Path) -> None:
    rows = conversations(sessions=6, turns=3)
    trace = write_mooncake(tmp_path / "trace.jsonl.gz", rows)
    fast = str(max(1.0, rows[-1]["timestamp"] / 3_000))
    process = start(
        "demo", "--trace", str(trace), "--speed", fast, "--pods", "2", "--seconds", "40", "--json"
    )
    output, errors = finish(process)
    assert process.returncode == 0, errors
    said = json.loads(output)
    assert not said["interrupted"]
    for figures in said["policies"].values():
        assert (figures["requests"], figures["failed"], figures["routed_alone"]) == (len(rows), 0, 0)
        assert figures["hit_rate"] > 0


def test_a_picture_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    picture = tmp_path / "demo.svg"
    process = start("demo", "--seconds", "1", "--pods", "1", "--picture", str(picture), "--json")
    output, errors = finish(process)
    assert (process.returncode, errors) == (0, "")
    assert json.loads(output)["policies"]
    text = picture.read_text()
    assert "prefix_and_load" in text.replace("&#95;", "_")
    assert set(re.findall(r"https?://[a-z.]+", text)) <= {
        "http://www.w",
        "https://www.textualize.io",
        "http://",
    }
    assert "url(" not in text.replace("url(#", "")


def test_a_trace_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    process = start("demo", "--trace", str(tmp_path / "none.jsonl"), "--seconds", "1")
    output, errors = finish(process)
    assert (process.returncode, output) == (1, "")
    assert "cannot be read" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_ends_everything_with_a_summary(number: signal.Signals) -> None:
    process = start("demo", "--pods", "2", "--seconds", "600")
    wait_for(process, "dashboard")
    process.send_signal(number)
    output, errors = finish(process)
    assert process.returncode == 0, errors
    assert "interrupted; the dashboard was at" in output
    assert "Traceback" not in errors


def test_the_whole_group_is_interrupted_as_a_terminal_does_it() -> None:
    process = start("demo", "--pods", "1", "--seconds", "600")
    wait_for(process, "dashboard")
    for _ in range(3):  # an impatient person
        os.killpg(process.pid, signal.SIGINT)
    output, errors = finish(process)
    assert process.returncode == 0, errors
    assert "interrupted" in output
    assert "Traceback" not in errors


@pytest.mark.parametrize("number", range(8))
def test_a_signal_at_any_moment_leaves_nothing_and_no_traceback(number: int, tmp_path: Path) -> None:
    """From the first line of ours to the traffic; whatever moment this hits, the claim is about every one of them."""
    after_s = random.uniform(0.1, 2.5)
    trace = write_mooncake(tmp_path / "trace.jsonl", conversations(sessions=20, turns=4))
    process = start(
        "demo", "--pods", "3", "--seconds", "600", *(["--trace", str(trace)] if number % 2 else [])
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(after_s)
    process.send_signal((signal.SIGINT, signal.SIGTERM)[number // 4])
    output, errors = finish(process)
    said = f"after {after_s:.3f} s: {process.returncode} {output} {errors}"
    if process.returncode == 0:
        assert "interrupted" in output, said
        assert "Traceback" not in errors, said
    elif process.returncode == 130:
        assert (output, errors) == ("", ""), said
    else:
        # Before any line of ours could run, or asked to terminate before it had begun anything: the system's own.
        assert process.returncode in (-signal.SIGINT, -signal.SIGTERM), said
        assert output == "", said


def test_a_cancellation_that_got_lost_in_the_start_ends_the_traffic_at_once() -> None:
    """As a signal makes one. A wait that ends at the same moment can swallow it, on Python 3.11 in asyncio.wait_for."""
    shown: list[str] = []

    async def body() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(DEADLINE_S)
        await _drive(DemoSettings(seconds=None), DemoOutcome(), lambda *_: shown.append("traffic"))

    async def run() -> None:
        task = asyncio.create_task(body())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert shown == []


def test_a_taken_port_is_one_sentence() -> None:
    with own_indexer() as url:
        process = start("demo", "--port", url.rpartition(":")[2], "--seconds", "1")
        output, errors = finish(process)
    assert process.returncode == 1
    assert "the indexer did not start" in errors
    assert "Traceback" not in errors.partition("it said:")[0]
    assert output == ""


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """An indexer, and pods that are named and announced as in a container."""
    with own_indexer() as url:
        listen = ("--by-hostname", "--host", "0.0.0.0", "--port", "0")
        pods = start("simulate", *listen, "--pods", "2", "--indexer", url)
        try:
            wait_for(pods, "Ctrl-C")
            yield url, pods
        finally:
            pods.send_signal(signal.SIGINT)
            finish(pods)


def test_traffic_reaches_the_pods_that_an_indexer_knows(fleet: tuple[str, subprocess.Popen[str]]) -> None:
    url, _ = fleet
    known = httpx.get(f"{url}/v1/pods").json()["pods"]
    assert len(known) == 2
    for pod in known:
        host = os.uname().nodename
        assert pod["pod"].startswith(f"pod-{host}-")
        assert pod["zmq_endpoint"].startswith(f"tcp://{host}:")
        assert pod["metrics_url"].startswith(f"http://{host}:")
    process = start("traffic", "--url", url, "--seconds", "5", "--rate", "5", "--json")
    output, errors = finish(process)
    assert process.returncode == 0, errors
    figures = json.loads(output)["policies"]["prefix_and_load"]
    assert figures["requests"] > 5
    assert figures["hit_rate"] > 0
    assert (figures["failed"], figures["routed_alone"]) == (0, 0)
    assert set(figures["requests_per_pod"]) == {pod["pod"] for pod in known}


def test_a_router_follows_pods_that_come_and_go() -> None:
    async def follow() -> Router:
        async with AsyncClient("http://127.0.0.1:9") as nobody, httpx.AsyncClient() as http:
            router = Router([nobody], http, "simulated", {"a": "http://127.0.0.1:9"}, "prefix_and_load")
            await router.send([1, 2, 3], 1)
            router.set_pods({"b": "http://127.0.0.1:9", "c": "http://127.0.0.1:9"})
            for _ in range(4):
                await router.send([1, 2, 3], 1)
        return router

    failed = {pod: figures.failed for pod, figures in asyncio.run(follow()).figures.items()}
    assert failed == {"a": 1, "b": 2, "c": 2}


def test_a_router_goes_on_in_turn_without_its_indexer(fleet: tuple[str, subprocess.Popen[str]]) -> None:
    url, _ = fleet
    urls = {
        pod["pod"]: pod["metrics_url"].removesuffix("/metrics")
        for pod in httpx.get(f"{url}/v1/pods").json()["pods"]
    }

    async def send() -> Router:
        async with AsyncClient("http://127.0.0.1:9") as nobody, httpx.AsyncClient(trust_env=False) as http:
            router = Router([nobody], http, "simulated", urls, "prefix_and_load")
            for number in range(4):
                served = await router.send(list(range(number, number + 40)), 3)
                assert served is not None
                assert len(served.answer) == 3
        return router

    router = asyncio.run(send())
    assert router.alone == 4
    assert [figures.requests for figures in router.figures.values()] == [2, 2]


def test_replicas_are_asked_in_turn_and_one_of_them_is_enough(
    fleet: tuple[str, subprocess.Popen[str]],
) -> None:
    url, _ = fleet
    urls = {
        pod["pod"]: pod["metrics_url"].removesuffix("/metrics")
        for pod in httpx.get(f"{url}/v1/pods").json()["pods"]
    }

    def asked() -> float:
        text = httpx.get(f"{url}/metrics").text
        return float(text.partition("\nkvindexer_route_choices_round_robin_total ")[2].split()[0])

    async def send() -> Router:
        async with (
            AsyncClient("http://127.0.0.1:9") as nobody,
            AsyncClient(url) as indexer,
            httpx.AsyncClient(trust_env=False) as http,
        ):
            router = Router([nobody, indexer], http, "simulated", urls, "round_robin")
            for number in range(4):
                assert await router.send(list(range(number, number + 40)), 3) is not None
        return router

    before = asked()
    router = asyncio.run(send())
    assert (router.alone, asked() - before) == (0, 4)


def test_a_pod_that_is_gone_is_counted_and_does_not_raise(fleet: tuple[str, subprocess.Popen[str]]) -> None:
    url, _ = fleet

    async def send() -> Router:
        async with AsyncClient(url) as indexer, httpx.AsyncClient(trust_env=False) as http:
            router = Router([indexer], http, "simulated", {"gone": "http://127.0.0.1:9"}, "prefix_and_load")
            assert await router.send([1, 2, 3], 3) is None
        return router

    assert asyncio.run(send()).figures["gone"].failed == 1


def test_traffic_without_an_indexer_is_refused_in_a_sentence_when_interrupted() -> None:
    process = start("traffic", "--url", "http://127.0.0.1:9", "--seconds", "1")
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2.0)
    process.send_signal(signal.SIGINT)
    output, errors = finish(process)
    assert process.returncode == 0, errors
    assert "interrupted" in output
