"""Pods and an indexer that are started at the same time, in either order."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from app.errors import Unresponsive
from app.simulator import fleet
from app.simulator.fleet import Fleet, FleetSettings
from tests.serving.test_serving import DEADLINE_S, serving, start


def test_an_indexer_that_starts_later_than_the_pods_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        nobody.settimeout(DEADLINE_S)
        port = nobody.getsockname()[1]
        pods = start("simulate", "--pods", "1", "--port", "0", "--indexer", f"http://127.0.0.1:{port}")
        nobody.accept()[0].close()  # they have asked, and nobody has answered
    try:
        with serving("serve", "--port", str(port)):
            assert pods.stdout is not None
            assert pods.stdout.readline().startswith("pod-0 ")
            assert httpx.get(f"http://127.0.0.1:{port}/v1/pods/pod-0").status_code == 200
    finally:
        pods.terminate()
        _, err = pods.communicate(timeout=DEADLINE_S)
    assert (pods.returncode, err) == (0, "")


def test_an_indexer_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "INDEXER_DEADLINE_S", 0.0)

    async def run(url: str) -> None:
        async with Fleet(FleetSettings(pods=1, indexer_urls=(url,))):
            raise AssertionError("nobody was told")

    with socket.socket() as held:  # bound, and nobody listens
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(Unresponsive, match=f"no answer from the indexer at {url}"):
            asyncio.run(run(url))
