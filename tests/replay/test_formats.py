"""Both forms of a capture, read from real ones, and what is refused."""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.errors import InvalidInput
from app.replay.capture import Answer, Capture, Frame, Reset, Send
from app.replay.formats import load_capture

CAPTURES = Path(__file__).parent.parent / "data" / "captures"


def kinds(capture: Capture) -> Counter[str]:
    return Counter(type(step).__name__ for step in capture.steps)


def test_workload_of_two_pods() -> None:
    capture = load_capture(CAPTURES / "v0.32.0-workload")
    assert kinds(capture) == {"Frame": 522, "Send": 400, "Answer": 400, "Reset": 4}
    assert capture.ranks == {"pod-a": (0,), "pod-b": (0,)}
    assert (capture.block_size, capture.salts_published) == (32, True)
    assert sum(request.cache_salt is not None for request in capture.requests) == 38
    assert not any(request.concurrent for request in capture.requests)
    assert {request.dp_rank for request in capture.requests} == {0}


@pytest.mark.parametrize(
    ("release", "salts_published"),
    [("v0.9.2", False), ("v0.17.1", True), ("v0.23.0", True), ("v0.33.0", True)],
)
def test_salts_are_published_from_0_17_on(release: str, salts_published: bool) -> None:
    capture = load_capture(CAPTURES / "core" / f"{release}.jsonl")
    assert capture.salts_published is salts_published
    assert sum(request.cache_salt is not None for request in capture.requests) == 16
    assert (capture.block_size, len(capture.requests)) == (16, 200)


def test_recording_names_adapter_and_base_model() -> None:
    capture = load_capture(CAPTURES / "v0.32.0-lora")
    assert capture.model == "tiny"
    assert Counter(request.lora for request in capture.requests) == {None: 29, "tiny-lora": 1}


def test_recording_marks_requests_that_ran_together() -> None:
    capture = load_capture(CAPTURES / "v0.32.0-bytes-cbor-seed42")
    together = [request for request in capture.requests if request.concurrent]
    assert sorted(request.cached_tokens or 0 for request in together) == [0, 192, 192, 192]
    assert len({tuple(request.token_ids[:192]) for request in together}) == 1
    assert len(capture.requests) == 29


def test_recording_takes_text_and_chat_as_the_engine_tokenised_them() -> None:
    capture = load_capture(CAPTURES / "v0.32.0-bytes-cbor-seed42")
    text, chat = (r for r in capture.requests if len(r.token_ids) in (91, 139))
    assert (text.cached_tokens, chat.cached_tokens) == (0, 0)
    assert list(chat.token_ids[:3]) == [1, 388, 201]


def test_recording_without_reported_truth_is_read_all_the_same() -> None:
    capture = load_capture(CAPTURES / "v0.32.0")
    assert {request.cached_tokens for request in capture.requests} == {None}


def test_rank_is_the_one_that_stored_the_prompt() -> None:
    capture = load_capture(CAPTURES / "v0.32.0-dp2")
    assert capture.ranks == {"pod": (0, 1)}
    sequential = [request for request in capture.requests if not request.concurrent]
    ranks = [request.dp_rank for request in sequential]
    # cold, shared, repeat, repeat, short (31 tokens: nobody stores), decode, salt, salt, full report
    assert ranks[:9] == [0, 1, 0, 1, None, 1, 0, 1, 0]
    assert None not in ranks[9:]


def test_frames_wait_for_the_request_line_of_the_same_instant(tmp_path: Path) -> None:
    write_recording(tmp_path, [start(1.0), response(2.0)], [published(1.0, 0)])
    assert [type(step) for step in load_capture(tmp_path).steps] == [Send, Frame, Answer]


def test_refused_reset_opens_no_window(tmp_path: Path) -> None:
    refused = {"kind": "reset_prefix_cache", "t": 3.0, "status": 200, "response": '{"success":false}'}
    done = {"kind": "reset_prefix_cache", "t": 4.0, "status": 200, "response": '{"success":true}'}
    write_recording(tmp_path, [start(1.0), response(2.0), refused, done], [published(1.5, 0)])
    resets = [step for step in load_capture(tmp_path).steps if isinstance(step, Reset)]
    assert len(resets) == 1


# -- what is refused


def workload_lines() -> list[dict[str, Any]]:
    return [
        {"kind": "send", "pod": "a", "i": 0},
        {"kind": "event", "pod": "a", **published(0.0, 0)},
        {"kind": "request", "pod": "a", "i": 0, "prompt_token_ids": [1, 2, 3, 4], "cached_tokens": 0},
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "truncated"),
        ('{"kind":"sent","pod":"a","i":1}', "sent"),
        ('{"kind":"send","pod":"a"}', "`i`"),
        ('{"kind":"send","pod":"a","i":"1"}', "int"),
        ('{"kind":"event","pod":"a","frames":["AA==","AAAAAAAAAAE="]}', "three frames"),
        ('{"kind":"event","pod":"a","frames":["","AAAA","AA=="]}', "8 bytes"),
        ('{"kind":"event","pod":"a","frames":["","not base64!","AA=="]}', "base64"),
        ('{"kind":"request","pod":"a","i":7,"prompt_token_ids":[1]}', "no `send` line"),
    ],
)
def test_unreadable_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "workload.jsonl"
    path.write_text("\n".join([*map(json.dumps, workload_lines()), line]))
    with pytest.raises(InvalidInput, match=complaint) as refused:
        load_capture(path)
    assert "workload.jsonl:4" in str(refused.value)


def test_number_sent_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text("\n".join(map(json.dumps, [workload_lines()[0], *workload_lines()])))
    with pytest.raises(InvalidInput, match="same number"):
        load_capture(path)


def test_request_that_was_never_answered_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text("\n".join(map(json.dumps, [*workload_lines(), {"kind": "send", "pod": "a", "i": 1}])))
    assert len(load_capture(path).requests) == 1


def test_response_without_a_request_is_refused(tmp_path: Path) -> None:
    write_recording(tmp_path, [start(1.0), response(2.0), response(3.0)], [published(1.5, 0)])
    with pytest.raises(InvalidInput, match="without a request"):
        load_capture(tmp_path)


def test_capture_that_stores_nothing_is_refused(tmp_path: Path) -> None:
    write_recording(tmp_path, [start(1.0), response(2.0)], [])
    with pytest.raises(InvalidInput, match="nothing to check"):
        load_capture(tmp_path)


def test_folder_that_is_no_capture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="neither"):
        load_capture(tmp_path)
    (tmp_path / "requests.jsonl").touch()
    with pytest.raises(InvalidInput, match=r"no pub\*\.jsonl"):
        load_capture(tmp_path)


def published(t: float, seq: int) -> dict[str, Any]:
    stored = ["BlockStored", [seq + 1], None, [1, 2, 3, 4], 4, None]
    frames = (b"", seq.to_bytes(8, "big"), msgspec.msgpack.encode([t, [stored], 0]))
    return {"t": t, "frames": [base64.b64encode(frame).decode() for frame in frames]}


def start(t: float) -> dict[str, Any]:
    return {"kind": "request_start", "t": t, "prompt_token_ids": [1, 2, 3, 4, 5], "model": "m", "extra": {}}


def response(t: float) -> dict[str, Any]:
    return {"kind": "response", "t": t, "prompt_tokens_details": {"cached_tokens": 0}}


def write_recording(folder: Path, requests: list[dict[str, Any]], frames: list[dict[str, Any]]) -> None:
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, requests)))
    (folder / "pub.jsonl").write_text("\n".join(map(json.dumps, frames)))
