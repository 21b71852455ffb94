"""Tiny traces made here, in the forms of the recorded ones."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any


def write_mooncake(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def conversations(*, sessions: int, turns: int, seed: int = 1) -> list[dict[str, Any]]:
    """Chats that share block 0 and grow by one to three blocks a turn, the turns of all mixed in time."""
    draw = random.Random(seed)
    next_block = 1
    rows: list[dict[str, Any]] = []
    for _ in range(sessions):
        blocks = [0]
        at_ms = draw.randrange(20_000)
        for _ in range(turns):
            grown = draw.randrange(1, 4)
            blocks = [*blocks, *range(next_block, next_block + grown)]
            next_block += grown
            partial = draw.choice([0, 1, 511])
            rows.append(
                {
                    "timestamp": at_ms,
                    "input_length": 512 * len(blocks) - partial,
                    "output_length": draw.choice([1, 40, 600]),
                    "hash_ids": blocks,
                }
            )
            if partial:  # a partial block is never a prefix of the next turn
                blocks = blocks[:-1]
            at_ms += draw.randrange(5_000, 20_000)
    return sorted(rows, key=lambda row: row["timestamp"])
