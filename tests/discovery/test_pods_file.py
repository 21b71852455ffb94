"""The pods file while it changes: lines that come and go, links that are swapped, contents that are broken."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from app.discovery.pods_file import PodsFile
from app.ingest.registry import read_pods_file
from tests.discovery.waiting import Told, put, until, watching

ONE = "a=tcp://10.0.0.1:5557,model=m\n"
TWO = ONE + "b=,model=m\n"


def place(path: Path) -> PodsFile:
    return PodsFile(path, read_pods_file(path), interval_s=0.01)


def test_lines_come_change_and_go(tmp_path: Path) -> None:
    path = tmp_path / "pods"
    path.write_text(ONE)

    async def run() -> None:
        async with watching(place(path)) as told:
            await until(lambda: told.names == {"a"}, "the first")
            put(path, TWO)
            await until(lambda: told.names == {"a", "b"}, "the second")
            put(path, TWO.replace("10.0.0.1", "10.0.0.2"))
            await until(
                lambda: told.pictures[-1]["a"].spec.zmq_endpoint == "tcp://10.0.0.2:5557",  # type: ignore[union-attr]
                "another address",
            )
            put(path, "# nobody\n")
            await until(lambda: told.names == set(), "nobody")
            assert told.failures == []
            assert told.deleted == [], "an empty file may be a half-written one"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (ONE + "b=tcp://10.0.0.1,model=m\n", "line 2: pod 'b': 'tcp://10.0.0.1' has no port"),
        (ONE + ONE, "line 2: pod 'a' is there twice"),
        ("\xff", "is not UTF-8"),
    ],
)
def test_a_broken_file_keeps_the_picture_until_it_is_right(tmp_path: Path, content: str, fault: str) -> None:
    path = tmp_path / "pods"
    path.write_text(ONE)

    async def run() -> None:
        async with watching(place(path)) as told:
            put(path, content.encode("latin-1"))
            await until(lambda: told.failures, "a failure")
            assert fault in told.failures[0]
            assert told.names == {"a"}
            put(path, TWO)
            await until(lambda: told.names == {"a", "b"}, "the next")

    asyncio.run(run())


def test_a_file_that_is_gone_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "pods"
    path.write_text(ONE)

    async def run() -> None:
        async with watching(place(path)) as told:
            path.rename(tmp_path / "away")
            await until(lambda: told.failures, "a failure")
            assert "No such file" in told.failures[0]
            count = len(told.pictures)
            (tmp_path / "away").rename(path)
            await until(lambda: len(told.pictures) > count, "it is seen again")
            assert told.names == {"a"}

    asyncio.run(run())


def test_a_link_that_is_swapped_under_the_path(tmp_path: Path) -> None:
    """As Kubernetes changes what a ConfigMap mounts: path -> ..data/pods, ..data -> a folder of its own."""
    for name, content in (("1", ONE), ("2", TWO)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pods").write_text(content)
        os.utime(tmp_path / name / "pods", (1_000_000_000, 1_000_000_000))
    (tmp_path / "..data").symlink_to("1")
    path = tmp_path / "pods"
    path.symlink_to("..data/pods")

    async def run() -> None:
        async with watching(place(path)) as told:
            await until(lambda: told.names == {"a"}, "the first")
            (tmp_path / "next").symlink_to("2")
            (tmp_path / "next").rename(tmp_path / "..data")
            await until(lambda: told.names == {"a", "b"}, "the second")

    asyncio.run(run())


def test_two_changes_within_one_tick_of_the_file_system(tmp_path: Path) -> None:
    """Same size, same times, same inode: only a second look can tell."""
    path = tmp_path / "pods"
    path.write_text(ONE)

    async def run() -> None:
        async with watching(place(path)) as told:
            await until(lambda: len(told.pictures) > 1, "it was read")
            status = path.stat()
            with path.open("r+") as file:
                file.write(ONE.replace("10.0.0.1", "10.0.0.9"))
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            await until(lambda: _endpoint(told) == "tcp://10.0.0.9:5557", "the second change")

    asyncio.run(run())


def test_a_settled_file_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "pods"
    path.write_text(ONE)
    os.utime(path, (1_000_000_000, 1_000_000_000))
    settled, specs, _ = place(path).look(None)
    assert settled is not None
    assert specs == read_pods_file(path)
    assert place(path).look(settled) == (settled, None, "")
    path.touch()
    assert place(path).look(settled) == (None, specs, ""), "changed a moment ago: read once more"


def _endpoint(told: Told) -> str | None:
    spec = told.pictures[-1]["a"].spec
    return None if spec is None else spec.zmq_endpoint
