"""The pods file, read again when it changes.

It is looked at every `interval_s`; a polled `stat` sees what notifications do not, such as the link that Kubernetes
swaps under a mounted ConfigMap. A file that was changed a moment before it was read is read once more, as two
changes within one tick of the file system's clock have the same times. A file that is broken or gone keeps the
picture as it was, and the place fails with the line and the fault until it is right again.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from app.discovery.sightings import Report, Sighting
from app.errors import InvalidInput
from app.ingest.registry import read_pods_file
from app.pods import PodSpec

_SAME_TICK_S = 2.0  # times of some file systems are that coarse


class PodsFile:
    """`first` are the pods that were read from it at the start."""

    def __init__(self, path: Path, first: tuple[PodSpec, ...], *, interval_s: float) -> None:
        self.name = place_of(path)
        self._path = path
        self._first = first
        self._interval_s = interval_s

    async def watch(self, report: Report) -> None:
        report.seen(_picture(self._first))
        seen: tuple[object, ...] | None = None
        while True:
            looked, specs, cause = await asyncio.to_thread(self.look, seen)
            seen = looked
            if cause:
                report.failed(cause)
            elif specs is not None:
                report.seen(_picture(specs))
            await asyncio.sleep(self._interval_s)

    def look(
        self, seen: tuple[object, ...] | None
    ) -> tuple[tuple[object, ...] | None, tuple[PodSpec, ...] | None, str]:
        """(what identifies this state of the file, its pods unless it is as it was, the fault)."""
        try:
            status = self._path.stat()
        except OSError as error:
            return None, None, f"{self._path} cannot be read: {error.strerror}"
        state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if state == seen:
            return state, None, ""
        is_settled = time.time() - status.st_mtime > _SAME_TICK_S
        try:
            return (state if is_settled else None), read_pods_file(self._path), ""
        except InvalidInput as error:
            return (state if is_settled else None), None, str(error)


def place_of(path: Path) -> str:
    """How the place is named, and the pods that come from it."""
    return f"file:{path}"


def _picture(specs: tuple[PodSpec, ...]) -> dict[str, Sighting]:
    # An edited line is the same pod with other words: whether it keeps what it holds is the registry's to say.
    return {spec.name: Sighting(spec.name, incarnation="", spec=spec) for spec in specs}
