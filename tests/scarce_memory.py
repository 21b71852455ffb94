"""Stories of a process that gets no more memory: Python text, told by an interpreter of its own, whose address space the
story bounds where it wants to. Which table meets the bound is up to the place."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MARKS = [
    pytest.mark.skipif("TEST_CORE" in os.environ, reason="sanitizers need all of the address space"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

_START = """
import random, resource, signal, sys
from pathlib import Path

signal.alarm(60)  # whoever looks for ever for what is not there

def bound(most):
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

def taken():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
"""


def tell(story: str, *arguments: int) -> None:
    """With `bound(bytes)`, `taken()` in bytes, and the arguments in `sys.argv`. It fails where the story does."""
    done = subprocess.run(
        [sys.executable, "-c", _START + story, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
