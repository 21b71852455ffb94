"""`python -m app` is the command `kvindexer`; without a word it serves.

Loading the commands takes a third of a second, in which a Ctrl-C would be a traceback from the middle of some
import: until they are loaded it ends the process in silence, with the status that a shell gives it.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(INTERRUPTED)


def run() -> None:
    """The console script."""
    # Left alone where it is ignored, as by a shell for what runs in the background.
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, _leave)
    from app.cli import main

    def loaded() -> None:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    main(loaded=loaded)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.argv.append("serve")
    run()
