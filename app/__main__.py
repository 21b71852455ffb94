"""`python -m app` is the command `kvindexer`; without a word it serves."""

from __future__ import annotations

import sys

from app.cli import main

if __name__ == "__main__":
    main(sys.argv[1:] or ["serve"])
