"""Keys that change while the process runs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from app.auth.api_keys import parse_setting
from app.auth.key_ring import Bucket, KeyRing
from app.errors import InvalidSettings


class Ring:
    """A key ring over a real file; `revoked` counts how often streams had to end."""

    def __init__(self, path: Path | None, fixed: str = "", rate_per_s: float = 0.0) -> None:
        self.revoked = 0
        self.ring = KeyRing(
            parse_setting(fixed), path, new_bucket=lambda: Bucket(rate_per_s, 2), on_revoked=self._revoke
        )

    def _revoke(self) -> None:
        self.revoked += 1

    def refresh(self) -> None:
        asyncio.run(self.ring.refresh())

    def may(self, key: str) -> str:
        caller = self.ring.find(key.encode())
        return "nothing" if caller is None else "write" if caller.may_write else "read"

    def count(self, name: str) -> int:
        return self.ring.counters()[name]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("old-key-0123456789:write\nstaying-key-01234567:read\n")
    return path


def test_rotation(path: Path) -> None:
    """First both keys, then only the new one, as everybody rotates."""
    ring = Ring(path, fixed="fixed-key-0123456789:read")
    path.write_text("old-key-0123456789:write\nnew-key-0123456789:write\nstaying-key-01234567:read\n")
    assert ring.may("new-key-0123456789") == "nothing"
    ring.refresh()
    assert [ring.may(f"{key}-key-0123456789") for key in ("old", "new", "fixed")] == [
        "write",
        "write",
        "read",
    ]
    assert (ring.revoked, ring.count("reloads")) == (0, 1)
    path.write_text("new-key-0123456789:write\nstaying-key-01234567:read\n")
    ring.refresh()
    assert [ring.may(f"{key}-key-0123456789") for key in ("old", "new", "fixed")] == [
        "nothing",
        "write",
        "read",
    ]
    assert (ring.revoked, ring.count("reloads"), ring.ring.gauges()["keys"]) == (1, 2, 3)
    ring.refresh()
    assert ring.count("reloads") == 2, "a file that is the same is no change"


def test_smaller_scope_counts_as_revoked(path: Path) -> None:
    ring = Ring(path)
    path.write_text("old-key-0123456789:read\nstaying-key-01234567:write\n")
    ring.refresh()
    assert (ring.may("old-key-0123456789"), ring.may("staying-key-01234567")) == ("read", "write")
    assert ring.revoked == 1


@pytest.mark.parametrize("content", ["", "# all gone\n", "old-key-0123456789\n", "\0\0\0", None])
def test_broken_file_changes_nothing(
    path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    ring = Ring(path)
    before = path.read_text()
    path.unlink() if content is None else path.write_text(content)
    with caplog.at_level(logging.INFO):
        ring.refresh()
        ring.refresh()
    assert (ring.may("old-key-0123456789"), ring.may("staying-key-01234567")) == ("write", "read")
    assert (ring.count("reload_failures"), ring.count("reloads"), ring.revoked) == (2, 0, 0)
    (record,) = caplog.records  # said once, counted each time
    assert (record.levelname, "those from before stay" in record.message) == ("ERROR", True)
    assert "old-key" not in caplog.text
    path.write_text(before)
    with caplog.at_level(logging.INFO):
        ring.refresh()
    assert "can be read again" in caplog.records[-1].message
    assert ring.count("reload_failures") == 2


def test_file_is_needed_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="No such file"):
        Ring(tmp_path / "nothing")


def test_key_is_needed_where_there_are_keys(path: Path) -> None:
    assert not Ring(None).ring.is_needed
    assert Ring(None, fixed="a-key:read").ring.is_needed
    assert Ring(path).ring.is_needed


def test_key_of_both_has_the_larger_scope(path: Path) -> None:
    path.write_text("one-key-0123456789:read\ntwo-key-0123456789:write\n")
    ring = Ring(path, fixed="one-key-0123456789:write,two-key-0123456789:read")
    assert [ring.may(f"{key}-key-0123456789") for key in ("one", "two")] == ["write", "write"]


def test_key_that_stays_keeps_its_bucket(path: Path) -> None:
    ring = Ring(path, rate_per_s=1.0)
    caller = ring.ring.find(b"staying-key-01234567")
    assert caller is not None
    assert [caller.bucket.take(10.0) for _ in range(3)] == [0.0, 0.0, 1.0]
    path.write_text("staying-key-01234567:write\n")
    ring.refresh()
    again = ring.ring.find(b"staying-key-01234567")
    assert again is not None
    assert again.bucket.take(10.0) == 1.0


def test_short_keys_are_advised_against(caplog: pytest.LogCaptureFixture) -> None:
    Ring(None, fixed="hunter2:read")
    assert "can be guessed" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("step_s", [0.0, 0.001, 0.499, 0.5, 0.501, 10.0])
def test_bucket_never_gives_more_than_its_rate(step_s: float) -> None:
    bucket = Bucket(2.0, 3)
    taken = [now_s for i in range(200) if bucket.take(now_s := 100.0 + i * step_s) == 0.0]
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            allowed = 3 + 2.0 * (taken[last] - taken[first])
            assert last - first + 1 <= allowed + 1e-6
    wanted = min(200, int(3 + 2.0 * 199 * step_s))
    assert abs(len(taken) - wanted) <= 1
