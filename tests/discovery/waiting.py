"""Waiting for what another task brings about, without sleeping on a guess."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path

from app.discovery.discovery import end
from app.discovery.sightings import Place, Sighting

DEADLINE_S = 30.0


async def until(condition: Callable[[], object], what: str) -> None:
    """`condition` may be a coroutine function."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                found = condition()
                if (await found) if inspect.isawaitable(found) else found:
                    return
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never: {what}") from None


def put(path: Path, content: str | bytes) -> None:
    """Whoever reads sees all of it or what was there before."""
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(content.encode() if isinstance(content, str) else content)
    beside.replace(path)


class Told:
    """A Report that keeps what it is told, in order: pictures, and causes of failures."""

    def __init__(self) -> None:
        self.pictures: list[dict[str, Sighting]] = []
        self.deleted: list[str] = []
        self.failures: list[str] = []

    def seen(self, picture: Mapping[str, Sighting], *, deleted: Collection[str] = ()) -> None:
        self.pictures.append(dict(picture))
        self.deleted += deleted

    def failed(self, cause: str) -> None:
        self.failures.append(cause)

    @property
    def names(self) -> set[str]:
        return set(self.pictures[-1]) if self.pictures else set()


@contextlib.asynccontextmanager
async def watching(place: Place) -> AsyncIterator[Told]:
    told = Told()
    task = asyncio.create_task(place.watch(told))
    try:
        yield told
    finally:
        await end([task])
