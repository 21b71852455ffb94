"""How a process of ours starts another one."""

from __future__ import annotations

import sys


def child_command(module: str, *arguments: str) -> list[str]:
    """Of a module of the installed package, and not of a folder `app` that happens to lie where we were started."""
    return [sys.executable, "-P", "-m", module, *arguments]
