"""Both forms of traces, and what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.errors import InvalidInput
from app.experiment.trace import BLOCK_IDS_MAX, load_trace
from tests.experiment.traces import conversations, write_mooncake


def test_mooncake_plain_and_gzipped_read_alike(tmp_path: Path) -> None:
    rows = conversations(sessions=3, turns=4)
    plain = load_trace(write_mooncake(tmp_path / "t.jsonl", rows))
    packed = load_trace(write_mooncake(tmp_path / "t.jsonl.gz", rows))
    assert plain.requests == packed.requests
    assert len(plain.requests) == 12
    assert plain.block_tokens == 512
    first = plain.requests[0]
    assert (first.at_s, first.prompt_tokens) == (rows[0]["timestamp"] / 1_000, rows[0]["input_length"])
    assert first.block_ids == tuple(rows[0]["hash_ids"])


def test_equal_blocks_have_equal_tokens_and_others_differ_in_every_run(tmp_path: Path) -> None:
    row = {"timestamp": 0, "output_length": 1}
    rows = [
        {**row, "input_length": 1_030, "hash_ids": [7, 128, 9]},
        {**row, "input_length": 1_536, "hash_ids": [7, 129, 9]},
    ]
    trace = load_trace(write_mooncake(tmp_path / "t.jsonl", rows))
    one, other = trace.token_ids(0), trace.token_ids(1)
    assert (len(one), len(other)) == (1_030, 1_536)
    assert one[:512] == other[:512]
    assert one[1_024:] == other[1_024:1_030]
    assert all(one[at : at + 4] != other[at : at + 4] for at in range(512, 1_024, 4))
    assert max(one) < 128


def test_pdelta_keeps_the_start_of_its_sessions_last_prompt(tmp_path: Path) -> None:
    lines = [
        {"format": "made up", "block": 16},
        [0, "a", 40, 5, 0, [0, 1]],
        [10, "b", 33, 0, 0, [5, 6]],
        [20, "a", 70, 5, 1, [2, 3, 4]],
    ]
    path = tmp_path / "t.pdelta.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = load_trace(path)
    assert trace.block_tokens == 16
    assert [request.block_ids for request in trace.requests] == [(0, 1), (5, 6), (0, 2, 3, 4)]
    assert [request.output_tokens for request in trace.requests] == [5, 1, 5]
    # 8 tokens of the first prompt and 6 of the last belong to no block: nobody else has them.
    tails = [trace.token_ids(0)[32:], trace.token_ids(2)[64:]]
    assert [len(tail) for tail in tails] == [8, 6]
    assert tails[0][:4] != tails[1][:4]


def test_requests_come_in_the_order_of_their_time(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 5_000, "input_length": 512, "output_length": 1, "hash_ids": [1]},
        {"timestamp": 1_000, "input_length": 512, "output_length": 1, "hash_ids": [2]},
    ]
    trace = load_trace(write_mooncake(tmp_path / "t.jsonl", rows))
    assert [request.at_s for request in trace.requests] == [1.0, 5.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("no json\n", "line 1"),
        ('{"format": "x", "block": 16}\n', "has no request"),
        ('{"format": "x", "block": 6}\n[0, "a", 6, 1, 0, [0]]\n', "blocks of 6 tokens"),
        ('{"format": "x", "block": 16}\n[0, "a", 32, 1, 1, [0]]\n', "has 0 blocks, not 1 to keep"),
        ('{"format": "x", "block": 16}\n[0, "a", 16, 1, 0, [0, 1]]\n', "16 tokens are not 2 blocks"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}\n',
            "513 tokens are 2 blocks",
        ),
        (
            f'{{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [{BLOCK_IDS_MAX}]}}\n',
            "block ids",
        ),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}\n', "cannot be"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=said):
        load_trace(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "t.jsonl.gz"
    broken.write_bytes(b"not gzip")
    for path in (broken, tmp_path / "missing.jsonl"):
        with pytest.raises(InvalidInput, match="cannot be read"):
            load_trace(path)
