"""`python -m app.replay`: the same as `kvindexer replay`."""

from __future__ import annotations

import typer

from app.replay.command import replay

if __name__ == "__main__":
    typer.run(replay)
