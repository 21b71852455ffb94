"""The simulated cache against real engines: given the same requests it says the same, event for event."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.events import AllBlocksCleared, BlockRemoved, BlocksHashed, BlockStored, Event, PrefixesStored
from app.ingest.vllm import WireForm, decode_batch, encode_batch
from app.replay.capture import Answer, Frame, Reset
from app.replay.formats import load_capture
from app.simulator.kv_cache import KVCacheSettings, PagedKVCache

CAPTURES = Path(__file__).parent.parent / "data" / "captures"

Said = tuple[object, ...]


class Names:
    """Engine hashes by the order in which they were first told: equal streams get equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def of(self, block_hashes: bytes) -> tuple[int, ...]:
        names = [block_hashes[start : start + 8] for start in range(0, len(block_hashes), 8)]
        return tuple(self._numbers.setdefault(name, len(self._numbers)) for name in names)

    def said(self, event: Event) -> Said:
        match event:
            case BlockStored():
                parent = event.parent_block_hash
                before = self.of(parent.to_bytes(8, "little")) if parent is not None else None
                salted = tuple(bool(keys) for keys in event.extra_keys or ())
                return "stored", before, self.of(event.block_hashes), event.token_ids, salted
            case BlockRemoved():
                return "removed", self.of(event.block_hashes)
            case AllBlocksCleared():
                return ("cleared",)
            case PrefixesStored() | BlocksHashed():
                raise AssertionError("no engine says this")


@pytest.mark.parametrize(
    ("name", "pod", "pages", "nameless_first", "events"),
    [
        ("core/v0.17.1.jsonl", "pod-a", 63, False, 894),
        ("core/v0.23.0.jsonl", "pod-a", 63, False, 894),
        ("core/v0.33.0.jsonl", "pod-a", 63, True, 831),
        ("v0.32.0-workload", "pod-a", 39, True, 571),
        ("v0.32.0-workload", "pod-b", 55, True, 405),
    ],
)
def test_same_requests_give_the_same_events(
    name: str, pod: str, pages: int, nameless_first: bool, events: int
) -> None:
    """`pages` is one less than the engine's blocks: it keeps one for itself."""
    capture = load_capture(CAPTURES / name)
    cache = PagedKVCache(
        KVCacheSettings(capacity_pages=pages, block_size=capture.block_size, nameless_first=nameless_first)
    )
    engine, simulated = Names(), Names()
    told: list[Said] = []
    expected: list[Said] = []
    for step in capture.steps:
        match step:
            case Frame() if step.pod == pod:
                expected += [engine.said(event) for event in decode_batch(step.payload).events]
            case Reset() if step.pod == pod:
                assert cache.reset()
            case Answer():
                request = capture.requests[step.request]
                if request.pod != pod:
                    continue
                attached = cache.attach("request", request.token_ids, salt=request.cache_salt)
                assert attached.cached_tokens == request.cached_tokens
                for token in request.output_token_ids[:-1]:
                    cache.append("request", [token])
                cache.detach("request")
                payload = encode_batch(WireForm.MAPS_0_33, ts=0.0, events=cache.drain_events())
                told += [simulated.said(event) for event in decode_batch(payload).events]
    assert len(expected) == events
    assert told == expected
