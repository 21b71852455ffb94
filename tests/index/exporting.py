"""An export as the keeper of snapshots makes it, in slices that a test chooses."""

from __future__ import annotations

from collections.abc import Callable

from app.index.prefix_index import IndexExport


def export_frames(
    writing: IndexExport,
    beside: Callable[[int], tuple[bytes, bool]],
    slice_: int,
    meanwhile: Callable[[], None],
) -> list[bytes]:
    """Names, and what goes `beside` them; `meanwhile` is called between any two slices, but not at the end."""
    frames: list[bytes] = []
    for write in (writing.names, beside):
        done = False
        while not done:
            frame, done = write(slice_)
            frames.append(frame)
            meanwhile()
    for _ in range(2):
        frames += [writing.changes(slice_)[0], beside(slice_)[0]]
        meanwhile()
    left = 1
    while left:
        frame, left = writing.changes(slice_)
        frames.append(frame)
    done = False
    while not done:
        frame, done = beside(slice_)
        frames.append(frame)
    return frames
