"""One rule of the wire a test: what an engine may publish, and what comes of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from app.errors import UnreadableBatch
from app.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Tier
from app.ingest.vllm import Reject, decode_batch
from app.ingest.wire_fields import BLOCK_SIZE_MAX, TEXT_MAX
from app.ingest.wire_notation import CHILDREN_MAX
from tests.captures import pack, plain_hashes, plain_tokens


def encode(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def decode(*events: Any, block_size: int | None = None) -> EventBatch:
    return decode_batch(encode(*events), block_size=block_size)


def one(event: Any, block_size: int | None = None) -> Any:
    batch = decode(event, block_size=block_size)
    assert (batch.rejected, batch.ignored, batch.positions) == ((), 0, (0,))
    return batch.events[0]


def reason(event: Any, block_size: int | None = None) -> str:
    """The reason for which an event is rejected; the events around it are not touched."""
    batch = decode(["AllBlocksCleared"], event, {"type": "AllBlocksCleared"}, block_size=block_size)
    assert batch.events == (AllBlocksCleared(), AllBlocksCleared())
    assert batch.positions == (0, 2)
    (rejected,) = batch.rejected
    assert rejected.index == 1
    assert rejected.detail
    return rejected.reason


def is_ignored(event: Any, block_size: int | None = None) -> bool:
    batch = decode(event, block_size=block_size)
    assert batch.rejected == ()
    assert batch.ignored + len(batch.events) == 1
    return batch.ignored == 1


def stored(**changes: Any) -> dict[str, Any]:
    """A BlockStored as a map; a field that is set to ... is left out."""
    event = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": 10,
        "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **changes,
    }
    return {name: value for name, value in event.items() if value is not ...}


STORED = BlockStored(
    block_hashes=plain_hashes([11, 12]),
    parent_block_hash=10,
    token_ids=plain_tokens([1, 2, 3, 4, 5, 6, 7, 8]),
    block_size=4,
)


# -- the batch


def test_a_batch_is_an_array_or_a_map() -> None:
    events = [stored()]
    expected = EventBatch(events=(STORED,), positions=(0,), ts=1.5, dp_rank=3)
    for batch in (
        [1.5, events, 3],
        [1.5, events, 3, "later", {"fields": 1}],
        {"ts": 1.5, "events": events, "data_parallel_rank": 3},
        {"type": "KVEventBatch", "events": events, "attn_dp_rank": 3, "ts": 1.5, "later": [1]},
    ):
        assert decode_batch(msgspec.msgpack.encode(batch)) == expected


def test_time_and_rank_may_be_missing() -> None:
    batches: list[Any] = [[None, [], None], [None, []], {"events": []}]
    for batch in batches:
        assert decode_batch(msgspec.msgpack.encode(batch)) == EventBatch(events=(), positions=())
    assert decode_batch(msgspec.msgpack.encode([5, []])).ts == 5.0
    for time in (float("nan"), float("inf"), float("-inf"), -5.0, -5, -1e308):
        assert decode_batch(msgspec.msgpack.encode([time, []])).ts is None


@pytest.mark.parametrize(
    "batch",
    [
        5,
        "batch",
        None,
        [],
        [1.0],
        [1.0, None],
        [1.0, {"a": 1}],
        [1.0, b"\x90"],
        {"ts": 1.0},
        {"events": 5},
        ["now", []],
        [True, []],
        [[1.0], []],
        [1.0, [], -1],
        [1.0, [], 1.0],
        [1.0, [], True],
        [1.0, [], 2**31],
        [1.0, [], [0]],
        {1: 2},
    ],
)
def test_what_is_no_batch_is_unreadable(batch: Any) -> None:
    with pytest.raises(UnreadableBatch):
        decode_batch(msgspec.msgpack.encode(batch))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xff\xff",
        b"GET / HTTP/1.1",
        b"\x92" * 1_000_000,
        b"\x93\xca\x00\x00\x00\x00" + b"\x91" * 1_000_000 + b"\x90\x00",
        b"\x92\xc0\xdd\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff\xc0\x90",
        b"\x92\xc0\xdf\xff\xff\xff\xff\xc0",
    ],
)
def test_bombs_and_scraps_are_unreadable_and_cheap(payload: bytes) -> None:
    try:
        batch = decode_batch(payload)
    except UnreadableBatch:
        return
    assert batch.events == ()
    assert len(batch.rejected) == 1


def test_a_cut_batch_is_unreadable_as_a_whole() -> None:
    payload = encode(stored(), ["AllBlocksCleared"])
    for cut in range(len(payload)):
        with pytest.raises(UnreadableBatch):
            decode_batch(payload[:cut])
    with pytest.raises(UnreadableBatch):
        decode_batch(payload + b"\x00")


def test_a_batch_of_too_many_events_is_unreadable() -> None:
    with pytest.raises(UnreadableBatch, match="too many"):
        decode_batch(msgspec.msgpack.encode([1.0, [0] * (CHILDREN_MAX + 1)]))


def test_a_view_of_bytes_is_a_payload() -> None:
    assert decode_batch(memoryview(b"x" + encode(stored()))[1:]).events == (STORED,)


# -- shapes of an event


def test_every_release_of_the_array_shape() -> None:
    """vLLM 0.9, 0.10.2, 0.14, 0.17, 0.20 and 0.22; then elements of a day to come."""
    fields = [[11, 12], 10, [1, 2, 3, 4, 5, 6, 7, 8], 4]
    later = [None, "GPU", None, None, 0, "full_attention", None, "LOCAL", {"new": [1]}]
    for length in range(len(later) + 1):
        assert one(["BlockStored", *fields, *later[:length]]) == STORED
    for removed in (
        ["BlockRemoved", [11]],
        ["BlockRemoved", [11], "GPU"],
        ["BlockRemoved", [11], None, 0, "x", []],
    ):
        assert one(removed) == BlockRemoved(block_hashes=plain_hashes([11]))


def test_arrays_carry_what_maps_carry() -> None:
    keys = [["ad", "salt"], ["ad"]]
    values = [[11, 12], None, [1, 2, 3, 4, 5, 6, 7, 8], 4, 7, "CPU", "ad", keys, 2, "mla_attention", 9]
    names = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
    names += ["extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"]
    event = one(["BlockStored", *values])
    assert event == one({"type": "BlockStored", **dict(zip(names, values, strict=True))})
    assert event == BlockStored(
        block_hashes=plain_hashes([11, 12]),
        parent_block_hash=None,
        token_ids=plain_tokens([1, 2, 3, 4, 5, 6, 7, 8]),
        block_size=4,
        lora="ad",
        tier=Tier.CPU,
        group=2,
        extra_keys=(pack(["salt"]), b""),
    )


def test_fields_that_nobody_asked_for_are_passed_over() -> None:
    later = {
        "locality": "LOCAL",
        "ownership": "x",
        "session_id": 5,
        "lookahead_token_ids": [1],
        "new": {"a": [{}]},
    }
    assert one(stored(**later)) == STORED
    removed = {
        "type": "BlockRemoved",
        "block_hashes": [11],
        "medium": "GPU",
        "locality": "REMOTE",
        "ownership": 1,
    }
    assert one(removed) == BlockRemoved(block_hashes=plain_hashes([11]))
    assert one({"type": "AllBlocksCleared", "why": "reset"}) == AllBlocksCleared()


def test_shapes_may_be_mixed_in_a_batch() -> None:
    batch = decode(stored(), ["BlockRemoved", [11]], {"type": "AllBlocksCleared"}, ["AllBlocksCleared"])
    assert [type(event) for event in batch.events] == [
        BlockStored,
        BlockRemoved,
        AllBlocksCleared,
        AllBlocksCleared,
    ]


@pytest.mark.parametrize("event", [5, None, "BlockStored", b"BlockStored", {1: 2}, 1.5])
def test_what_is_no_event_is_unreadable(event: Any) -> None:
    assert reason(event) == Reject.UNREADABLE


@pytest.mark.parametrize(
    "event",
    [
        ["BlockTransferred", [1]],
        {"type": "Heartbeat"},
        {"type": 5},
        {"type": True},
        [7, [1]],
        {"type": "x" * 10_000},
    ],
)
def test_an_unknown_tag_is_skipped(event: Any) -> None:
    assert reason(event) == Reject.UNKNOWN_TYPE


@pytest.mark.parametrize("event", [[], {}, {"block_hashes": [1]}, {"type": None}])
def test_an_event_without_a_tag(event: Any) -> None:
    assert reason(event) == Reject.MISSING_FIELD


@pytest.mark.parametrize("name", ["block_hashes", "token_ids", "block_size"])
def test_a_missing_field_is_named(name: str) -> None:
    batch = decode(stored(**{name: ...}))
    assert [(fault.reason, fault.detail) for fault in batch.rejected] == [
        (Reject.MISSING_FIELD, f"{name}: missing")
    ]


def test_a_removal_needs_hashes() -> None:
    assert reason(["BlockRemoved"]) == Reject.MISSING_FIELD
    assert reason({"type": "BlockRemoved", "medium": "GPU"}) == Reject.MISSING_FIELD


# -- hashes and tokens


@pytest.mark.parametrize(
    ("engine_hash", "number"),
    [
        (-1, 2**64 - 1),
        (-(2**63), 2**63),
        (2**64 - 1, 2**64 - 1),
        (0, 0),
        (b"\x01", 1),
        (bytes(16) + b"\x80" + bytes(7), 2**63),
        (bytes(range(32)), 0x18191A1B1C1D1E1F),
    ],
)
def test_engine_hashes_are_64_bits(engine_hash: Any, number: int) -> None:
    assert one(["BlockRemoved", [engine_hash]]).block_hashes == number.to_bytes(8, "little")
    assert one(stored(parent_block_hash=engine_hash)).parent_block_hash == number


@pytest.mark.parametrize("engine_hash", [1.0, True, None, "ff", b"", [1], {"a": 1}])
def test_what_is_no_engine_hash(engine_hash: Any) -> None:
    assert reason(["BlockRemoved", [5, engine_hash]]) == Reject.BAD_HASH
    if engine_hash is not None:
        assert reason(stored(parent_block_hash=engine_hash)) == Reject.BAD_HASH
    if engine_hash != [1]:
        assert reason(["BlockRemoved", engine_hash]) == Reject.BAD_HASH


@pytest.mark.parametrize("token", [-1, 2**32, 1.0, True, None, "1", b"1", {"a": 1}])
def test_what_is_no_token(token: Any) -> None:
    batch = decode(stored(token_ids=[1, 2, 3, token, 5, 6, 7, 8]))
    assert batch.rejected[0].reason == Reject.BAD_TOKEN
    assert "token_ids: element 3 is" in batch.rejected[0].detail


def test_the_largest_token() -> None:
    event = one(stored(token_ids=[0, 2**32 - 1] * 4))
    assert event.token_ids == plain_tokens([0, 2**32 - 1] * 4)


def test_a_root_has_no_parent() -> None:
    assert one(stored(parent_block_hash=None)).parent_block_hash is None
    assert one(stored(parent_block_hash=...)).parent_block_hash is None
    assert one(stored(parent_block_hash=0)).parent_block_hash == 0


# -- block sizes and lengths


@pytest.mark.parametrize("block_size", [-4, 4.0, "4", True, None, BLOCK_SIZE_MAX + 1, 2**63, [4], 0])
def test_what_is_no_block_size(block_size: Any) -> None:
    assert reason(stored(block_size=block_size)) in {Reject.BLOCK_SIZE, Reject.BAD_FIELD}


def test_the_pod_has_one_block_size_on_the_gpu() -> None:
    assert one(stored(), block_size=4) == STORED
    assert reason(stored(), block_size=8) == Reject.BLOCK_SIZE
    assert reason(stored(), block_size=2) == Reject.BLOCK_SIZE


@pytest.mark.parametrize("count", [0, 1, 4, 7, 9, 16])
def test_tokens_must_fill_the_blocks(count: int) -> None:
    assert reason(stored(token_ids=[1] * count)) == Reject.LENGTH_MISMATCH
    assert (
        reason(stored(token_ids=[1] * count, kv_cache_spec_kind="full_attention")) == Reject.LENGTH_MISMATCH
    )


def test_pages_of_one_token() -> None:
    event = one(["BlockStored", [-5], None, [9], 1, None, "GPU"], block_size=1)
    assert (event.block_count, event.block_size, event.token_ids) == (1, 1, plain_tokens([9]))


def test_an_event_without_blocks_says_nothing() -> None:
    assert is_ignored(stored(block_hashes=[], token_ids=[]))
    assert is_ignored(stored(block_hashes=[]))
    assert is_ignored(["BlockRemoved", []])


# -- tiers


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.GPU),
        ("GPU", Tier.GPU),
        ("gpu", Tier.GPU),
        ("CPU", Tier.CPU),
        ("cpu", Tier.CPU),
        ("CPU_PINNED", Tier.CPU),
        ("STORAGE", Tier.DISK),
        ("FS", Tier.DISK),
        ("DISK", Tier.DISK),
        ("EXTERNAL", Tier.EXTERNAL),
        ("OBJ", Tier.EXTERNAL),
        ("REMOTE", Tier.EXTERNAL),
    ],
)
def test_a_medium_is_a_tier(medium: str | None, tier: Tier) -> None:
    assert one(stored(medium=medium)).tier is tier
    assert one(["BlockRemoved", [1], medium]).tier is tier


def test_an_unknown_medium_never_passes_for_the_gpu() -> None:
    for event in (stored(medium="TAPE"), ["BlockRemoved", [1], "TAPE"], ["AllBlocksCleared", "TAPE"]):
        assert reason(event) == Reject.UNKNOWN_MEDIUM
    for event in (stored(medium=5), ["BlockRemoved", [1], [1]], stored(medium="x" * (TEXT_MAX + 1))):
        assert reason(event) == Reject.BAD_FIELD


def test_a_clear_is_of_the_gpu() -> None:
    assert one(["AllBlocksCleared", "GPU"]) == AllBlocksCleared()
    assert reason(["AllBlocksCleared", "CPU"]) == Reject.BAD_FIELD


@pytest.mark.parametrize("block_size", [0, 48])
def test_a_placeholder_of_an_offload_connector(block_size: int) -> None:
    """vLLM's connectors name blocks without their tokens, with 0 or a chunk size of their own."""
    event = stored(token_ids=[], block_size=block_size, parent_block_hash=None, medium="CPU")
    expected = BlockStored(
        block_hashes=plain_hashes([11, 12]),
        parent_block_hash=None,
        token_ids=b"",
        block_size=block_size,
        tier=Tier.CPU,
    )
    assert one(event, block_size=16) == expected
    assert one(event) == expected


def test_a_placeholder_of_the_gpu_has_no_block_size() -> None:
    assert one(stored(token_ids=[], block_size=0)).token_ids == b""
    assert reason(stored(token_ids=[], block_size=4)) == Reject.LENGTH_MISMATCH


def lmcache(tokens: int, block_size: int = 256, blocks: int = 1) -> dict[str, Any]:
    hashes = list(range(100, 100 + blocks))
    return stored(block_hashes=hashes, token_ids=[7] * tokens, block_size=block_size, medium="cpu")


def test_chunks_of_lmcache_are_larger_than_blocks() -> None:
    event = one(lmcache(256), block_size=16)
    assert (event.block_size, event.tier, event.block_count) == (256, Tier.CPU, 1)


def test_the_unfinished_end_of_a_prompt_is_left_out() -> None:
    assert is_ignored(lmcache(100), block_size=16)
    assert is_ignored(lmcache(100))
    # The in-process engine of LMCache gives the tail its own length for a block size.
    assert is_ignored(lmcache(100, block_size=100), block_size=16)
    event = one(lmcache(612, blocks=3), block_size=16)
    assert event.block_hashes == plain_hashes([100, 101])
    assert event.token_ids == plain_tokens([7] * 512)
    assert reason(lmcache(512, blocks=3), block_size=16) == Reject.LENGTH_MISMATCH
    assert reason(lmcache(769, blocks=3), block_size=16) == Reject.LENGTH_MISMATCH


def test_extra_keys_of_the_unfinished_end_are_left_out_too() -> None:
    event = one(lmcache(300, blocks=2) | {"extra_keys": [["a"], ["b"]]})
    assert event.extra_keys == (pack(["a"]),)


# -- groups of hybrid models


@pytest.mark.parametrize("kind", [None, "full_attention", "mla_attention", "sink_full_attention"])
def test_groups_that_cover_their_tokens_are_indexed(kind: str | None) -> None:
    event = one(stored(kv_cache_spec_kind=kind, group_idx=1))
    assert (event.group, event.block_count) == (1, 2)


@pytest.mark.parametrize(
    "kind",
    [
        "sliding_window",
        "sliding_window_mla",
        "mamba",
        "chunked_local_attention",
        "encoder_only_attention",
        "cross_attention",
        "unknown",
        "of_a_day_to_come",
    ],
)
def test_other_groups_are_ignored(kind: str) -> None:
    assert is_ignored(stored(kv_cache_spec_kind=kind, group_idx=1))
    # Fewer hashes than the tokens have blocks, or none at all: the window has moved on.
    assert is_ignored(stored(kv_cache_spec_kind=kind, group_idx=1, block_hashes=[12]), block_size=4)
    assert is_ignored(stored(kv_cache_spec_kind=kind, group_idx=1, block_hashes=[]))
    assert is_ignored(["BlockStored", [12], 10, [1] * 8, 4, None, "GPU", None, None, 1, kind, 8])


def test_a_sparse_group_of_a_release_without_kinds_is_ignored() -> None:
    assert is_ignored(["BlockStored", [12], 10, [1] * 8, 4, None, "GPU", None, None, 1])
    assert reason(["BlockStored", [12], 10, [1] * 8, 4, None, "GPU", None, None, 0]) == Reject.LENGTH_MISMATCH


def test_a_removal_keeps_its_group() -> None:
    """So that the removal in a group that is not indexed takes nothing from one that is."""
    assert one(["BlockRemoved", [11], "GPU", 3]).group == 3
    assert one(["BlockRemoved", [11], "GPU", None]).group == 0
    for group in (-1, 2**20, 1.0, "1", True):
        assert reason(["BlockRemoved", [11], "GPU", group]) == Reject.BAD_FIELD


# -- adapters and extra keys


@pytest.mark.parametrize(
    ("number", "name", "lora"),
    [
        (None, None, None),
        (-1, None, None),
        (3, None, "3"),
        (3, "", "3"),
        (3, "ad", "ad"),
        (None, "ad", "ad"),
        ("ad", None, "ad"),
        (..., ..., None),
    ],
)
def test_an_adapter_has_a_name_or_a_number(number: Any, name: Any, lora: str | None) -> None:
    assert one(stored(lora_id=number, lora_name=name)).lora == lora


@pytest.mark.parametrize("changes", [{"lora_id": 1.5}, {"lora_id": True}, {"lora_id": [1]}, {"lora_name": 5}])
def test_what_is_no_adapter(changes: dict[str, Any]) -> None:
    assert reason(stored(**changes)) == Reject.BAD_FIELD


def test_extra_keys_are_one_a_block() -> None:
    event = one(stored(extra_keys=[["salt", ["img", 0]], None]))
    assert event.extra_keys == (pack(["salt", ["img", 0]]), b"")
    assert one(stored(extra_keys=[None, None])).extra_keys is None
    assert one(stored(extra_keys=None)).extra_keys is None
    assert reason(stored(extra_keys=[None])) == Reject.BAD_EXTRA_KEYS


@pytest.mark.parametrize(
    "keys", [5, "salt", [5, None], ["salt", None], [[{"a": 1}], None], [[[[[[1]]]]], None]]
)
def test_what_are_no_extra_keys(keys: Any) -> None:
    assert reason(stored(extra_keys=keys)) == Reject.BAD_EXTRA_KEYS


def test_extra_keys_that_are_hard_to_read() -> None:
    head = encode(stored(extra_keys=5))
    for odd in (
        b"\x91" * 100_000 + b"\xc0",  # nesting
        b"\x92\x91\xa1\xff\xc0",  # text that is not UTF-8
        b"\x92\x91\xd6\xff\x00\x00\x00\x00\xc0",  # a timestamp
        b"\x92\x91\xd4\x01\x00\xc0",  # an extension
        b"\x92\x91\x81\x90\xc0\xc0",  # a map with an array for a key
    ):
        payload = head.replace(b"extra_keys\x05", b"extra_keys" + odd)
        assert [fault.reason for fault in decode_batch(payload).rejected] == [Reject.BAD_EXTRA_KEYS]


def test_the_salt_field_of_sglang_is_a_key_of_the_root() -> None:
    assert one(stored(parent_block_hash=None, cache_salt="s")).extra_keys == (pack(["s"]), b"")
    assert one(stored(cache_salt="s")).extra_keys is None
    assert one(stored(parent_block_hash=None, cache_salt="")).extra_keys is None
    assert reason(stored(parent_block_hash=None, cache_salt=5)) == Reject.BAD_FIELD


def test_a_salted_root_of_sglang_equals_that_of_vllm() -> None:
    sglang = {
        "type": "BlockStored",
        "block_hashes": [-7],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_id": None,
        "cache_salt": "s",
    }
    assert one(sglang) == one(["BlockStored", [-7], None, [1, 2], 2, None, "GPU", None, [["s"]], 0])


def test_pairs_of_tokens_are_refused_with_a_reason() -> None:
    pairs = stored(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [6, 7], [7, 8], [8, 9]])
    assert reason(pairs) == Reject.TOKEN_PAIRS


def test_every_reason_is_a_label() -> None:
    assert all(reject.value.replace("_", "").isalpha() for reject in Reject)
    assert type(decode(5).rejected[0].reason) is str
