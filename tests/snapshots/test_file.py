"""The file is as it was written, or it is refused with its reason."""

from __future__ import annotations

import functools
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import hashing
from app.errors import SnapshotRefused
from app.pods import PodSpec
from app.service.saved_state import SavedContext, SavedPod, SavedSource, SavedState
from app.snapshots.file import SnapshotReader, SnapshotWriter, previous_of
from app.snapshots.frames import FRAME_BYTES_MAX, FrameEncoder

STATE = SavedState(
    at_s=1_795_000_000.5,
    tick=77,
    digest="00ff",
    pods=[
        SavedPod(
            PodSpec("pod-a", "m", zmq_endpoint="tcp://h:1", dp_size=2),
            True,
            [SavedSource(3, 1, 41, 2**63, None, 16, {1: 256}, True, "a gap", 1.5)],
        )
    ],
    contexts=[SavedContext(1, "m", "tuned", 16)],
    slots=[(1, 0, 3, 0, 0, 5, 2**64 - 1)],
)
FRAMES = [b"", b"one" * 100, bytes(range(256))]


def write(path: Path, frames: list[bytes] = FRAMES, state: SavedState = STATE) -> int:
    writer = SnapshotWriter(path)
    for frame in frames:
        writer.add(frame)
    return writer.finish(state)


@functools.cache
def written() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot"
        write(path)
        return path.read_bytes()


def refusal(content: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot"
        path.write_bytes(content)
        with pytest.raises(SnapshotRefused) as caught:
            SnapshotReader(path)
        assert str(caught.value).startswith(f"{path} ")
        return str(caught.value)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    size = write(path)
    reader = SnapshotReader(path)
    assert (reader.state, list(reader.frames())) == (STATE, FRAMES)
    assert size == reader.size == path.stat().st_size
    assert [file.name for file in tmp_path.iterdir()] == ["snapshot"]


def test_a_file_that_lost_its_end_behind_the_look_is_not_half_a_picture(tmp_path: Path) -> None:
    """At a place where a frame ends: each that is there is whole."""
    path = tmp_path / "snapshot"
    write(path)
    reader = SnapshotReader(path)
    encoder = FrameEncoder()
    path.write_bytes(encoder.start + b"".join(map(encoder.index, FRAMES)))
    with pytest.raises(SnapshotRefused, match="changed while it was read: is damaged: its end is missing"):
        list(reader.frames())


@pytest.mark.parametrize("more", [FrameEncoder.index, FrameEncoder.state], ids=["index", "state"])
def test_nothing_follows_the_end_however_whole_it_is(more: Callable[[FrameEncoder, Any], bytes]) -> None:
    encoder = FrameEncoder()
    whole = encoder.start + encoder.index(b"one") + encoder.state(STATE)
    content = b"more" if more is FrameEncoder.index else STATE
    assert "something follows its end" in refusal(whole + more(encoder, content))


@pytest.mark.parametrize(
    "sizes", [(FRAME_BYTES_MAX + 1, 7), (7, FRAME_BYTES_MAX + 1)], ids=["stored", "opened"]
)
def test_what_a_frame_says_of_its_length_is_bounded(sizes: tuple[int, int]) -> None:
    """Also with a right checksum, which anybody can make."""
    start = FrameEncoder().start
    frame = struct.pack("<BII", 1, *sizes) + b"content"
    checksum = struct.pack("<Q", hashing.digest(frame, hashing.digest(start)))
    assert "there is no frame at byte 12" in refusal(start + frame + checksum)


def test_the_one_before_stays(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    for frames in ([b"first"], [b"second"], [b"third"]):
        write(path, frames)
    assert list(SnapshotReader(path).frames()) == [b"third"]
    assert list(SnapshotReader(previous_of(path)).frames()) == [b"second"]
    assert len(list(tmp_path.iterdir())) == 2


def test_discarded(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    write(path)
    writer = SnapshotWriter(path)
    writer.add(b"other")
    writer.discard()
    assert list(SnapshotReader(path).frames()) == FRAMES
    assert [file.name for file in tmp_path.iterdir()] == ["snapshot"]


def test_every_byte_counts() -> None:
    """One bit of each byte, and each byte replaced by its complement."""
    content = written()
    for at in range(len(content)):
        for mask in (1 << (at % 8), 0xFF):
            refusal(content[:at] + bytes([content[at] ^ mask]) + content[at + 1 :])


@given(data=st.data())
def test_any_damage_is_found(data: st.DataObject) -> None:
    """Runs of bytes replaced, cut out, put in, exchanged; the end cut off or prolonged."""
    content = written()
    first = data.draw(st.integers(0, len(content)))
    last = data.draw(st.integers(first, len(content)))
    damaged = content[:first] + data.draw(st.binary(max_size=40)) + content[last:]
    if damaged != content:
        refusal(damaged)


def test_every_length() -> None:
    content = written()
    for length in range(len(content)):
        refusal(content[:length])


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_of_a_version_before(tmp_path: Path, version: int) -> None:
    """As this one, without claims among its frames and owners in its state, and 2 without contents."""
    path = tmp_path / "snapshot"
    start = b"KVIXSNAP" + version.to_bytes(4, "little")
    encoder = FrameEncoder()
    encoder._checksum = hashing.digest(start)
    path.write_bytes(b"".join((start, *(encoder.index(frame) for frame in FRAMES), encoder.state(STATE))))
    reader = SnapshotReader(path)
    assert (reader.state, list(reader.frames())) == (STATE, FRAMES)


def test_frames_in_another_order(tmp_path: Path) -> None:
    write(tmp_path / "a", [b"x", b"y"])
    write(tmp_path / "b", [b"y", b"x"])
    first, second = (tmp_path / "a").read_bytes(), (tmp_path / "b").read_bytes()
    assert len(first) == len(second)
    frame = 9 + 10 + 8  # head, the content stored by zstd, checksum
    start = 12
    swapped = first[:start] + first[start + frame : start + 2 * frame] + first[start : start + frame]
    refusal(swapped + first[start + 2 * frame :])
    assert list(SnapshotReader(tmp_path / "b").frames()) == [b"y", b"x"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a snapshot"),
        (b"PK\x03\x04 something else entirely", "is not a snapshot"),
        (b"KVIXSNAP\x01\x00\x00\x00", "version 1, and this program reads 2 to 5"),
        (b"KVIXSNAP\x02\x00\x00\x00", "its end is missing"),
        (b"KVIXSNAP\x02\x00\x00\x00\x01\x01", "ends within the frame at byte 12"),
        (b"KVIXSNAP\x02\x00\x00\x00\x07" + bytes(8), "there is no frame at byte 12"),
    ],
)
def test_reasons(content: bytes, said: str) -> None:
    assert said in refusal(content)


def test_a_checksum_says_where() -> None:
    content = bytearray(written())
    content[20] ^= 1
    assert "the checksum of the frame at byte 12 is wrong" in refusal(bytes(content))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(SnapshotRefused, match="cannot be read: No such file"):
        SnapshotReader(tmp_path / "none")
