"""Every frame that was captured from a real engine decodes to what the engine meant."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from app.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from app.ingest.vllm import Message, decode_batch, parse_live, parse_replay_reply
from tests.captures import CAPTURES, plain_batch, read_frames, read_lines

PUBLISHED = sorted(path for path in CAPTURES.glob("*/pub*.jsonl") if "decoded" not in path.name)
MIXED = [*sorted(path for path in CAPTURES.glob("core/v*.jsonl") if "replay" not in path.name)]
MIXED.append(CAPTURES / "v0.32.0-workload" / "workload.jsonl")
REPLAYS = sorted(CAPTURES.glob("*/*replay*.jsonl"))


def name_of(path: Path) -> str:
    return str(path.relative_to(CAPTURES))


def test_captures_are_there() -> None:
    assert len(PUBLISHED) == 5
    assert len(MIXED) == 5
    assert len(REPLAYS) == 15


@pytest.mark.parametrize("path", PUBLISHED, ids=name_of)
def test_published_frames_equal_the_decoded_truth(path: Path) -> None:
    truth = list(read_lines(path.with_name(path.stem + ".decoded.jsonl")))
    messages = [parse_live(frames) for frames in read_frames(path)]
    assert [message.seq for message in messages] == [line["seq"] for line in truth]
    assert [decode_batch(message.payload, block_size=32) for message in messages] == [
        plain_batch(line["payload"]) for line in truth
    ]


@pytest.mark.parametrize("path", MIXED, ids=name_of)
def test_frames_of_every_release_equal_a_plain_reading(path: Path) -> None:
    kinds: Counter[type] = Counter()
    block_size = 32 if "workload" in path.name else 16
    for frames in read_frames(path):
        payload = parse_live(frames).payload
        batch = decode_batch(payload, block_size=block_size)
        assert batch == plain_batch(msgspec.msgpack.decode(payload))
        kinds.update(type(event) for event in batch.events)
    assert kinds[BlockStored] > 100
    assert kinds[BlockRemoved] > 100
    assert kinds[AllBlocksCleared] > 0


@pytest.mark.parametrize("path", REPLAYS, ids=name_of)
def test_replays_end_with_the_marker_and_decode(path: Path) -> None:
    *batches, last = [parse_replay_reply(frames) for frames in read_frames(path)]
    assert last.is_end
    assert not any(message.is_end for message in batches)
    seqs = [message.seq for message in batches]
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs))) if seqs else True
    for message in batches:
        assert decode_batch(message.payload) == plain_batch(msgspec.msgpack.decode(message.payload))


def test_a_replay_carries_the_frames_that_were_published() -> None:
    folder = CAPTURES / "v0.32.0"
    live = {message.seq: message for message in map(parse_live, read_frames(folder / "pub.jsonl"))}
    replayed: list[Message] = [
        parse_replay_reply(frames) for frames in read_frames(folder / "replay_from_5.jsonl")
    ][:-1]
    assert replayed == [live[seq] for seq in sorted(live) if seq >= 5]


def test_the_adapter_is_the_context_and_not_an_extra_key() -> None:
    folder = CAPTURES / "v0.32.0-lora"
    stored = [
        event
        for frames in read_frames(folder / "pub.jsonl")
        for event in decode_batch(frames[-1]).events
        if isinstance(event, BlockStored)
    ]
    adapted = [event for event in stored if event.lora == "tiny-lora"]
    assert adapted
    assert all(event.extra_keys is None for event in adapted)
    assert any(event.extra_keys for event in stored), "the capture has salted requests"


def test_a_hash_is_the_same_as_integer_and_as_bytes() -> None:
    """vLLM's integers are the low 64 bits of the digest: so are ours, when it publishes the digest."""
    digest = bytes(range(32))
    low = int.from_bytes(digest[-8:], "big")
    as_bytes = decode_one(["BlockRemoved", [digest], "GPU"])
    assert as_bytes == decode_one(["BlockRemoved", [low], "GPU"])


def decode_one(event: object) -> EventBatch:
    return decode_batch(msgspec.msgpack.encode([1.0, [event], 0]))
