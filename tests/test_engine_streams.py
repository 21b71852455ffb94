"""What engines beside plain vLLM say, from the bytes of the wire to the answer of a match: hybrid models, offload
connectors, LMCache, SGLang.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from app.config import Settings
from app.index.interface import Index
from app.index.prefix_index import IndexLimits, PrefixIndex
from app.ingest.vllm import Cleared, Removed, Stored, WireEvent, WireForm, decode_batch, encode_batch
from app.pods import PodSpec, SourceState
from app.service import BatchResult, IndexerService, MatchQuery, index_limits
from tests.reference import ReferenceIndex

BLOCK = 16


class Engine:
    """One pod of model m; every batch is encoded, decoded and applied as the ZMQ ingest does it."""

    def __init__(
        self, make_index: Callable[[IndexLimits], Index], form: WireForm, block_size: int | None
    ) -> None:
        settings = Settings()
        self.form = form
        self.block_size = block_size
        self.service = IndexerService(settings, make_index(index_limits(settings)), clock=lambda: 0.0)
        self.service.register(PodSpec("pod", "m", block_size=block_size))
        self.seq = 0

    def say(self, *events: WireEvent) -> BatchResult:
        payload = encode_batch(self.form, ts=1.0, events=events)
        batch = decode_batch(payload, block_size=self.block_size)
        assert not batch.rejected
        result = self.service.apply("pod", 0, batch, seq=self.seq)
        self.seq += 1
        return result

    def tiers(self, tokens: int, *, first: int = 0, salt: bytes | None = None) -> tuple[int, int]:
        """Depths on the GPU, and on the GPU or the CPU, in tokens, of the prompt first, first + 1, ..."""
        prompt = struct.pack(f"<{tokens}I", *range(first, first + tokens))
        keys = None if salt is None else (salt,)
        answer = self.service.match(MatchQuery("m", token_ids=prompt, extra_keys=keys))
        if not answer.matches:
            return 0, 0
        (row,) = answer.matches
        return row.tiers["gpu"] * answer.block_size, row.tiers["cpu"] * answer.block_size

    @property
    def state(self) -> SourceState:
        return self.service.pod("pod").sources[0].state


MakeEngine = Callable[..., Engine]


@pytest.fixture(params=[ReferenceIndex, PrefixIndex], ids=["reference", "native"])
def make(request: pytest.FixtureRequest) -> MakeEngine:
    def make_engine(form: WireForm = WireForm.MAPS_0_33, block_size: int | None = None) -> Engine:
        return Engine(request.param, form, block_size)

    return make_engine


def prompt(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


# -- blocks that are told again: computed once more, or reused


def full(first_block: int, blocks: int = 1, *, group: int = 1) -> Stored:
    """Blocks of the prompt 0, 1, 2, ...; block i is named 100 + i in every group."""
    names = range(100 + first_block, 100 + first_block + blocks)
    return Stored(
        block_hashes=list(names),
        parent_block_hash=99 + first_block if first_block else None,
        token_ids=prompt(first_block * BLOCK, blocks * BLOCK),
        block_size=BLOCK,
        group_idx=group,
        kv_cache_spec_kind="full_attention",
    )


@pytest.mark.parametrize("again", [1, 2, 3])
def test_leading_blocks_that_are_computed_again_are_copies(make: MakeEngine, again: int) -> None:
    """EAGLE gives back the last block of a hit, a prompt whose log-probabilities are asked for reads no cache."""
    engine = make()
    engine.say(full(0, again))
    engine.say(full(0, 4))
    names = [100 + block for block in reversed(range(again))]
    engine.say(*(Removed(block_hashes=[name], group_idx=1) for name in names))
    assert engine.tiers(4 * BLOCK) == (4 * BLOCK, 4 * BLOCK)
    engine.say(*(Removed(block_hashes=[name], group_idx=1) for name in names))
    assert engine.tiers(4 * BLOCK) == (0, 0)


@pytest.mark.parametrize("told", [2, 3])
def test_reused_blocks_that_are_told_once_more_are_no_copies(make: MakeEngine, told: int) -> None:
    """What vLLM says for a request with `kv_cache_report_mode: full`: the blocks of the hit, then those behind it."""
    engine = make()
    engine.say(full(0, 3))
    engine.say(full(0, told), full(3))
    engine.say(Removed(block_hashes=[100 + told - 1], group_idx=1))
    assert engine.tiers(4 * BLOCK) == ((told - 1) * BLOCK, (told - 1) * BLOCK)


# -- hybrid models: a full-attention group beside a sliding-window one


def sliding(names: list[int], tokens: int) -> Stored:
    """Keeps the last blocks only, and tells the tokens of all."""
    return Stored(
        block_hashes=names,
        token_ids=prompt(0, tokens),
        block_size=BLOCK,
        group_idx=0,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=32,
    )


@pytest.mark.parametrize("declared", [None, BLOCK])
def test_the_full_group_counts_and_the_sliding_one_takes_nothing_of_it(
    make: MakeEngine, declared: int | None
) -> None:
    engine = make(block_size=declared)
    engine.say(sliding([102, 103], 4 * BLOCK), full(0, 4), sliding([], 5 * BLOCK))
    assert engine.tiers(4 * BLOCK) == (64, 64)
    engine.say(Removed(block_hashes=[102, 103], group_idx=0))
    assert engine.tiers(4 * BLOCK) == (64, 64), "the sliding group's removal is its own"
    engine.say(Removed(block_hashes=[102], group_idx=1))
    assert engine.tiers(4 * BLOCK) == (32, 32)
    engine.say(full(2))
    assert engine.tiers(4 * BLOCK) == (64, 64)
    engine.say(Cleared())
    assert engine.tiers(4 * BLOCK) == (0, 0)
    assert engine.state is SourceState.LIVE


def test_two_full_groups_hold_a_block_until_both_let_go(make: MakeEngine) -> None:
    engine = make()
    engine.say(full(0, 2, group=0), full(0, 2, group=1))
    engine.say(Removed(block_hashes=[101], group_idx=0))
    assert engine.tiers(2 * BLOCK) == (32, 32)
    engine.say(Removed(block_hashes=[101], group_idx=1))
    assert engine.tiers(2 * BLOCK) == (16, 16)


def test_groups_of_a_release_without_kinds(make: MakeEngine) -> None:
    """Blocks that do not cover their tokens are of a sparse group, and nothing of the full one."""
    engine = make(WireForm.ARRAYS_0_20)
    sparse = Stored(block_hashes=[103], token_ids=prompt(0, 64), block_size=BLOCK, group_idx=1)
    engine.say(full(0, 4, group=0), sparse, Removed(block_hashes=[103], group_idx=1))
    assert engine.tiers(64) == (64, 64)


# -- offload connectors: placeholders without tokens


def placeholder(*names: int, medium: str = "CPU", group: int = 0) -> Stored:
    return Stored(block_hashes=names, token_ids=[], block_size=0, medium=medium, group_idx=group)


def test_placeholders_outlive_the_gpu_copy_and_a_clear(make: MakeEngine) -> None:
    engine = make()
    engine.say(full(0, 4, group=0), placeholder(100, 101, 102))
    assert engine.tiers(64) == (64, 64)
    engine.say(Removed(block_hashes=[101]), Removed(block_hashes=[103]))
    assert engine.tiers(64) == (16, 48)
    engine.say(Cleared())
    assert engine.tiers(64) == (0, 48), "a clear says nothing about offloaded blocks"
    engine.say(Removed(block_hashes=[101], medium="CPU"))
    assert engine.tiers(64) == (0, 16)


def test_placeholders_resolve_across_groups(make: MakeEngine) -> None:
    """The connector names the block by another group's number; what counts is the name."""
    engine = make()
    engine.say(full(0, 2, group=1), placeholder(100, 101, group=0))
    engine.say(Removed(block_hashes=[100, 101], group_idx=1))
    assert engine.tiers(32) == (0, 32)


def test_placeholder_of_a_name_never_heard_stores_nothing(make: MakeEngine) -> None:
    engine = make()
    assert engine.say(placeholder(7, 8)).stored_blocks == 0
    assert engine.say(Removed(block_hashes=[7], medium="CPU")).removed_blocks == 0
    assert engine.service.stats()["totals"]["unknown_blocks"] == 3
    assert engine.state is SourceState.LIVE


# -- LMCache: chunks of 256 tokens, each with a name of its own, and a shorter one at the end of a prompt


def chunk(name: int, first: int, tokens: int = 256, *, parent: int | None = None) -> Stored:
    return Stored(
        block_hashes=[name],
        parent_block_hash=parent,
        token_ids=prompt(first, tokens),
        block_size=tokens,
        medium="cpu",
    )


def contexts(engine: Engine) -> set[int]:
    return {context["block_size"] for context in engine.service.stats()["contexts"] if context["prefixes"]}


@pytest.mark.parametrize("declared", [None, BLOCK])
def test_chunks_lie_beside_engine_blocks(make: MakeEngine, declared: int | None) -> None:
    engine = make(block_size=declared)
    engine.say(full(0, 4, group=0), chunk(901, 0), chunk(902, 256, parent=901))
    assert engine.tiers(600) == (64, 512)
    engine.say(Cleared())
    assert engine.tiers(600) == (0, 512)
    engine.say(Removed(block_hashes=[902], medium="cpu"))
    assert engine.tiers(600) == (0, 256)


@pytest.mark.parametrize("declared", [None, BLOCK])
@pytest.mark.parametrize("tail", [1, 15, 16, 100, 128, 255])
def test_the_end_of_a_prompt_is_no_chunk(make: MakeEngine, declared: int | None, tail: int) -> None:
    """Longer prompts never find it, whether its length is a multiple of the engine's blocks or not."""
    engine = make(block_size=declared)
    engine.say(full(0, 1, group=0), chunk(901, 0))
    result = engine.say(chunk(902, 256, tail, parent=901), chunk(903, 5_000, tail))
    assert (result.stored_blocks, result.orphans) == (0, 0)
    assert engine.tiers(600) == (16, 256)
    assert engine.tiers(600, first=5_000) == (0, 0)
    assert contexts(engine) == {16, 256}


def test_an_end_that_came_first_is_forgotten_when_a_chunk_shows_the_size(make: MakeEngine) -> None:
    engine = make()
    engine.say(chunk(900, 5_000, 48))
    engine.say(full(0, 3, group=0), chunk(901, 0))
    assert engine.tiers(600, first=5_000) == (0, 0)
    assert engine.tiers(600) == (48, 256)


def test_the_size_of_chunks_is_learned_again_after_a_restart(make: MakeEngine) -> None:
    engine = make()
    engine.say(chunk(901, 0))
    engine.service.reset_source("pod", 0, restarted=True)
    engine.say(chunk(1, 0, 64), chunk(2, 64, 64, parent=1))
    assert engine.tiers(600) == (0, 128)


# -- SGLang: pages of one token, one event a page, signed names, the salt as a field


@pytest.mark.parametrize("form", [WireForm.SGLANG_ARRAYS, WireForm.SGLANG_MAPS])
def test_pages_of_one_token(make: MakeEngine, form: WireForm) -> None:
    engine = make(form)
    pages = [
        Stored(block_hashes=[-1 - i], parent_block_hash=-i if i else None, token_ids=[i], block_size=1)
        for i in range(20)
    ]
    engine.say(*pages)
    assert engine.tiers(25) == (20, 20)
    engine.say(Removed(block_hashes=[-16, -17, -18, -19, -20]))
    assert engine.tiers(25) == (15, 15)
    engine.say(Removed(block_hashes=[-1]))
    assert engine.tiers(25) == (0, 0)


def test_pages_move_to_the_host(make: MakeEngine) -> None:
    engine = make(WireForm.SGLANG_MAPS)
    page = Stored(block_hashes=[-5], token_ids=prompt(0, 16), block_size=16)
    on_host = Stored(block_hashes=[-5], token_ids=prompt(0, 16), block_size=16, medium="CPU_PINNED")
    engine.say(page, on_host, Removed(block_hashes=[-5], medium="GPU"))
    assert engine.tiers(16) == (0, 16)


def test_salted_pages_are_found_with_their_salt_only(make: MakeEngine) -> None:
    engine = make(WireForm.SGLANG_MAPS)
    engine.say(Stored(block_hashes=[-5], token_ids=prompt(0, 16), block_size=16, cache_salt="tenant"))
    assert engine.tiers(16) == (0, 0)
    assert engine.tiers(16, salt=b"\x91\xa6tenant") == (16, 16)
