"""The short way is taken, and cannot be told from the long one."""

from __future__ import annotations

import asyncio
import json
import math
import struct
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.api.short_way import ShortWay
from app.config import load_settings
from tests.api.conftest import CLEARED, Clock, Indexer, removed, stored

TOKENS = list(range(100, 116))
JSON = {"content-type": "application/json"}
OCTETS = {"content-type": "application/octet-stream"}
MSGPACK = {"content-type": "application/msgpack"}


def dumped(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


# -- it is taken


async def _nobody(_scope: Any, _receive: Any, _send: Any) -> None:
    raise AssertionError("the request was handed on")


HOT: dict[str, tuple[str, dict[str, str], bytes]] = {
    "tokens": ("/v1/match", JSON, dumped(model="m", token_ids=TOKENS)),
    **{
        f"tokens as {kind}": ("/v1/match", {"content-type": kind}, dumped(model="m", token_ids=TOKENS))
        for kind in ("application/json; charset=utf-8", "application/json;charset=UTF-8")
    },
    "hashes": ("/v1/match", JSON, dumped(model="m", prefix_hashes=[1, 2**64 - 1])),
    "null beside": ("/v1/match", JSON, dumped(model="m", token_ids=TOKENS, prefix_hashes=None, lora=None)),
    "all fields": (
        "/v1/match",
        JSON,
        dumped(
            model="m", token_ids=[], lora="", cache_salt="s", block_size=4, pods=["a"], include_hashes=False
        ),
    ),
    "octets": ("/v1/match?model=m&pods=pod-a,pod-b", OCTETS, struct.pack("<16I", *TOKENS)),
    "hashes in octets": ("/v1/match?model=m&hashes=true", OCTETS, struct.pack("<2Q", 1, 2**64 - 1)),
    "events": ("/v1/events", JSON, dumped(pod="pod-b", model="m", events=[stored([1], TOKENS[:4]), CLEARED])),
    "payload": (
        "/v1/events?pod=pod-b&model=m&seq=4&dp_rank=0",
        MSGPACK,
        msgspec.msgpack.encode([1.0, [stored([1], TOKENS[:4])], 0]),
    ),
}


@pytest.mark.parametrize("name", HOT)
def test_hot_requests_never_reach_the_framework(indexer: Indexer, way: str, name: str) -> None:
    if way == "long":
        pytest.skip("about the short way only")
    path, headers, body = HOT[name]
    alone = ShortWay(_nobody, wiring=indexer.app.state.wiring)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(alone), base_url="http://indexer"
        ) as client:
            return await client.post(path, content=body, headers=headers)

    assert asyncio.run(ask()).status_code == 200


def test_short_way_is_in_the_metrics(indexer: Indexer) -> None:
    indexer.post("/v1/match", {"model": "m", "token_ids": TOKENS})
    text = indexer.get("/metrics").text
    assert 'kvindexer_http_request_seconds_count{method="POST",route="/v1/match",status="200"} 1.0' in text
    assert "kvindexer_match_depth_blocks_count 1.0" in text


# -- it says the same


class Pair:
    """An application with the short way, one with the short cut in front of it, and one with neither, told the same at
    the same times."""

    def __init__(self, *, pods_max: int = 4, tokens_max: int = 40) -> None:
        self.clock = Clock()
        bounds = load_settings(
            tokens_max=tokens_max,
            events_max=6,
            body_bytes_max=4_096,
            pods_max=pods_max,
            dp_ranks_max=4,
            sweep_interval_s=60,  # a timer that fires for one of the two would make them differ
        )
        self.short, self.cut, self.long = self.all = [
            Indexer(bounds, self.clock, way=way) for way in ("short", "cut", "long")
        ]

    def fill(self) -> None:
        """Some of `PROMPT` on two pods, so that most questions have an answer."""
        for pod, blocks, medium in (("pod-a", 3, "GPU"), ("pod-b", 2, "GPU"), ("pod-b", 4, "CPU")):
            told = stored(list(range(1, blocks + 1)), PROMPT[: 4 * blocks], medium=medium)
            assert self.ask("/v1/events", JSON, dumped(pod=pod, model="m", events=[told])).status_code == 200
            self.clock.now_s += 0.1

    def ask(self, path: str, headers: dict[str, str], body: bytes) -> httpx.Response:
        answers = [
            indexer.post(path, content=body, headers={**headers, "x-request-id": "one"})
            for indexer in self.all
        ]
        other = answers[-1]
        for one in answers[:-1]:
            assert one.status_code == other.status_code, (path, headers, body, one.text, other.text)
            # The framework counts the bytes of its answers too.
            assert dict(one.headers) == dict(other.headers) | {
                "content-length": one.headers["content-length"]
            }
            if "json" in one.headers["content-type"]:
                assert _exact(one.json()) == _exact(other.json()), (path, headers, body)
            else:
                assert one.content == other.content
        return answers[0]

    def check_state(self) -> None:
        for indexer in self.all:
            indexer.service.tick()
        assert self.short.picture() == self.cut.picture() == self.long.picture()
        stats = [indexer.service.stats() for indexer in self.all]
        assert stats[0] == stats[1] == stats[2]
        assert len({_lags(indexer) for indexer in self.all}) == 1

    def close(self) -> None:
        for indexer in self.all:
            indexer.close()


def _lags(indexer: Indexer) -> str:
    """How many batches had a time."""
    return indexer.get("/metrics").text.partition("kvindexer_event_lag_seconds_count ")[2].partition("\n")[0]


def _exact(value: Any) -> Any:
    """1 and 1.0 are different here, and so are the orders of keys."""
    return json.dumps(value)


numbers = st.one_of(
    st.integers(0, 8), st.sampled_from([2**32 - 1, 2**32, 2**63, 2**64 - 1, 2**64, -1, -(2**63), 2**70])
)
rarely_odd = st.one_of(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6), numbers)
odd: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 1.5, "1", "ab", [], [1], {}, "", "\x07", "ü", -1, 2**70, 1e300]
)
PROMPT = [0, 1, 2, 0, 1] * 5
prompts = st.integers(0, len(PROMPT)).map(lambda length: PROMPT[:length])
token_lists = st.one_of(
    prompts,
    prompts,
    st.lists(st.integers(0, 2), max_size=24),
    st.lists(st.integers(0, 2), min_size=12, max_size=12),
    st.lists(rarely_odd, max_size=50),
    odd,
)
names = st.one_of(st.sampled_from(["m", "pod-a", "pod-b"]), st.text(max_size=3), odd)
hash_lists = st.one_of(
    st.lists(st.integers(-3, 3), max_size=4), st.lists(st.one_of(numbers, odd), max_size=4), odd
)

events = st.one_of(
    st.builds(
        stored,
        st.lists(st.integers(1, 4), min_size=1, max_size=3),
        st.one_of(st.lists(st.integers(0, 2), min_size=4, max_size=4), token_lists),
        parent=st.one_of(st.none(), st.integers(1, 4), numbers, odd),
        block_size=st.sampled_from([4, 4, 4, 8, 0]),
        medium=st.sampled_from(["GPU", "CPU", None, "moon", 7]),
    ),
    st.builds(
        lambda hashes, tokens: stored(hashes, tokens[: 4 * len(hashes)]),
        st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True),
        st.lists(st.integers(0, 2), min_size=12, max_size=12),
    ),
    st.builds(lambda hashes: {"type": "BlockStored", "block_hashes": hashes}, hash_lists),
    st.builds(lambda hashes: {"type": "BlockRemoved", "block_hashes": hashes}, hash_lists),
    st.builds(lambda tokens: {**CLEARED, "metadata": {"token_ids": tokens}}, token_lists),
    st.builds(removed, st.integers(1, 4)),
    st.just(CLEARED),
    odd,
)


def fields(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An object with its names in any order, and at times one that nobody knows."""
    whole = st.fixed_dictionaries(required, optional={**optional, "invented": odd})
    return whole.flatmap(lambda made: st.permutations(list(made.items()))).map(dict)


matches = fields(
    {"model": st.one_of(st.just("m"), names)},
    {
        "token_ids": token_lists,
        "prefix_hashes": hash_lists,
        "lora": names,
        "cache_salt": st.one_of(st.just("s"), odd),
        "block_size": st.one_of(st.just(4), odd),
        "pods": st.one_of(st.lists(st.sampled_from(["pod-a", "pod-b"]), max_size=3), odd),
        "include_hashes": st.one_of(st.booleans(), odd),
        "extra_keys": st.one_of(st.just([["s"]]), odd),
    },
)
plain_matches = st.builds(
    lambda tokens, more: {"model": "m", "token_ids": tokens, **more},
    st.one_of(prompts, token_lists),
    st.sampled_from([{}, {}, {"pods": ["pod-b", "pod-a"]}, {"block_size": 4}, {"lora": None}]),
)
posts = fields(
    {
        "pod": st.one_of(st.sampled_from(["pod-a", "pod-b"]), names),
        "events": st.one_of(st.lists(events, max_size=7), odd),
    },
    {
        "model": st.one_of(st.just("m"), st.just("m"), names),
        "dp_rank": st.one_of(st.sampled_from([0, 1, 4]), odd),
        "seq": st.one_of(st.integers(0, 6), numbers, odd),
        "ts": st.one_of(st.floats(), odd),
        "lora": names,
        "owner": st.one_of(st.just("agent1"), names),
    },
)
plain_posts = st.builds(
    lambda pod, told: {"pod": pod, "model": "m", "events": told},
    st.sampled_from(["pod-a", "pod-b"]),
    st.lists(events, max_size=4),
)


@st.composite
def damaged(draw: st.DrawFn, bodies: st.SearchStrategy[bytes]) -> bytes:
    """A body as it was meant, or with a piece of it lost, doubled or replaced."""
    body = draw(bodies)
    kind = draw(st.sampled_from(["whole", "whole", "whole", "cut", "double", "replace"]))
    if kind == "whole" or not body:
        return body
    start = draw(st.integers(0, len(body) - 1))
    end = draw(st.integers(start, min(len(body), start + 6)))
    piece = draw(
        st.sampled_from([b'"', b"\\", b"]", b"[", b",", b" ", b"5", b".5", b"null", b"\xff", b":", b"{"])
    )
    middle = {"cut": b"", "double": body[start:end] * 2, "replace": piece}[kind]
    return body[:start] + middle + body[end:]


def as_json(made: dict[str, Any]) -> bytes:
    return json.dumps(made, ensure_ascii=False).encode(errors="surrogatepass")


queries = st.lists(
    st.sampled_from(
        [
            "model=m", "pod=pod-a", "pod=pod-b", "seq=1", "seq=7", "dp_rank=1", "pods=pod-a", "hashes=true",
            "block_size=4", "lora=", "lora=a", "owner=a:b", "model=%6d", "cache_salt=s", "include_hashes=1", "ts=2",
            "x=1", "seq=-1",
        ]
    ),
    max_size=4,
).map("&".join)  # fmt: skip


def _as_msgpack(made: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(made)
    except OverflowError:  # it has no such number
        return b""


requests = st.one_of(
    st.tuples(st.just("/v1/match"), st.just(JSON), damaged(st.one_of(plain_matches, matches).map(as_json))),
    st.tuples(st.just("/v1/events"), st.just(JSON), damaged(st.one_of(plain_posts, posts).map(as_json))),
    st.tuples(
        queries.map("/v1/match?model=m&".__add__),
        st.just(OCTETS),
        damaged(
            st.one_of(prompts, st.lists(st.integers(0, 2), max_size=42)).map(
                lambda tokens: struct.pack(f"<{len(tokens)}I", *tokens)
            )
        ),
    ),
    st.tuples(
        st.one_of(st.just("/v1/events?pod=pod-a&model=m"), queries.map("/v1/events?".__add__)),
        st.just(MSGPACK),
        damaged(
            st.builds(
                lambda ts, told: _as_msgpack([ts, told, 0]),
                st.one_of(st.just(1.0), st.sampled_from([-1.0, -0.0, math.nan, -math.inf, 1, None])),
                st.lists(events, max_size=7),
            )
        ),
    ),
    st.tuples(
        st.sampled_from(["/v1/match", "/v1/events", "/v1/match?model=m"]),
        st.sampled_from(
            [MSGPACK, {**JSON, "accept": "application/msgpack"}, {}, {**JSON, "content-encoding": "br"}]
        ),
        st.one_of(matches.map(as_json), plain_matches.map(_as_msgpack), st.binary(max_size=20)),
    ),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(requests, st.sampled_from([0.0, 0.3])), min_size=4, max_size=16))
def test_both_ways_say_and_do_the_same(asked: list[tuple[Any, float]]) -> None:
    pair = Pair()
    try:
        pair.fill()
        for (path, headers, body), step_s in asked:
            pair.clock.now_s += step_s
            pair.ask(path, headers, body)
        pair.check_state()
    finally:
        pair.close()


# A stream as engines send it: of each batch its events, and what is said beside them.
STREAM: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([stored([1, 2], PROMPT[:8])], {"seq": 3}),
    ([stored([3], PROMPT[8:12], parent=2), stored([4], PROMPT[12:16], parent=3)], {"seq": 4}),
    ([stored([6], PROMPT[20:24], parent=5), removed(4)], {"seq": 5}),
    ([stored([5], PROMPT[16:20], parent=4)], {"seq": 5}),
    ([stored([4, 5], PROMPT[12:20], parent=3)], {"seq": 6}),
    ([removed(4), removed(4), removed(77)], {"seq": 7}),
    ([stored([1, 2], PROMPT[:8], medium="CPU")], {"seq": 8}),
    ([stored([1, 2, 3], PROMPT[:12], medium="CPU")], {"seq": 9}),
    ([{**stored([1], PROMPT[:4]), "lora_name": "l"}], {"seq": 10}),
    ([{**stored([1, 2], PROMPT[:8]), "lora_name": "l"}], {"seq": 11, "lora": "other"}),
    ([stored([8], PROMPT[:4])], {"seq": 12, "lora": "l"}),
    ([stored([9], PROMPT[:4])], {"seq": 14}),
    ([stored([9], PROMPT[:4]), CLEARED, stored([1, 2], PROMPT[:8])], {"seq": 15}),
    ([stored([3], PROMPT[8:12], parent=2)], {"seq": 16, "dp_rank": 0}),
    ([stored([3], PROMPT[8:12], parent=2)], {"dp_rank": 1}),
    ([stored([3], PROMPT[8:12], parent=2)], {"dp_rank": 1}),
    ([stored([1, 2], PROMPT[:8])], {"seq": 0}),
    ([stored([3], PROMPT[8:12], parent=2)], {"seq": 1, "owner": "agent"}),
    ([stored([4], PROMPT[12:16], parent=3)], {"seq": 2}),
    ([stored([4], PROMPT[12:17], parent=3)], {"seq": 3}),
    ([stored([4], PROMPT[12:16], parent=3)] * 7, {"seq": 3}),
    ([], {"seq": 3}),
]


@pytest.mark.parametrize("notation", ["JSON", "msgpack"])
def test_streams_of_engines_do_the_same(notation: str) -> None:
    pair = Pair()
    pair.fill()
    for number, (events, said) in enumerate(STREAM):
        pair.clock.now_s += 0.3
        if notation == "JSON":
            body = dumped(pod="pod-c", model="m", ts=pair.clock.now_s, events=events, **said)
            pair.ask("/v1/events", JSON, body)
        else:
            query = "&".join(
                f"{name}={value}" for name, value in {"pod": "pod-c", "model": "m", **said}.items()
            )
            # The rank of the payload counts where the query names none.
            payload = msgspec.msgpack.encode([pair.clock.now_s, events, number % 2])
            pair.ask(f"/v1/events?{query}", MSGPACK, payload)
        pair.ask("/v1/match", JSON, dumped(model="m", token_ids=PROMPT))
        pair.check_state()
    pair.close()


def test_rows_that_differ_in_many_ways_are_the_same() -> None:
    """More depths than groups are dealt to, names of any length and both sides of their bound, ages of every size."""
    pair = Pair(pods_max=40, tokens_max=400)
    prompt = list(range(160))
    for number in range(36):
        pod = f"pod-{number * 7 % 36}" + "x" * (number if number < 30 else number * 6)
        blocks = 1 + number // 2 if number < 30 else 40
        told = stored(list(range(1, blocks + 1)), prompt[: 4 * blocks])
        assert pair.ask("/v1/events", JSON, dumped(pod=pod, model="m", events=[told])).status_code == 200
        pair.clock.now_s += 0.0004 * 3**number if number < 11 else 0.0335
    for length in (160, 80, 12, 4):
        answer = pair.ask("/v1/match", JSON, dumped(model="m", token_ids=prompt[:length]))
        assert len(answer.json()["matches"]) == 36
    pair.check_state()
    pair.close()


def test_rows_of_many_pods_tiers_and_block_sizes_are_the_same() -> None:
    """Ties, offloaded chunks, ranks and announcements: whatever orders and figures of rows depend on."""
    pair = Pair()
    prompt = [*TOKENS, *TOKENS, 7]
    for rank, (blocks, medium) in enumerate([(2, "GPU"), (4, "GPU"), (4, "CPU"), (3, "CPU")]):
        for pod in ("pod-b", 'pod-"ü"', "pod-a"):
            told = stored(list(range(1, blocks + 1)), prompt[: 4 * blocks], medium=medium)
            post = dumped(pod=pod, model="m", dp_rank=rank, events=[told])
            assert pair.ask("/v1/events", JSON, post).status_code == 200
            pair.clock.now_s += 0.37
    chunk = stored([99], prompt[:32], block_size=32, medium="CPU")
    pair.ask("/v1/events", JSON, dumped(pod="pod-a", model="m", events=[chunk]))
    pair.ask("/v1/prefixes", JSON, dumped(pod="pod-b", model="m", token_ids=prompt))
    pair.ask("/v1/events", JSON, dumped(pod="pod-b", model="m", dp_rank=1, seq=0, events=[]))
    pair.ask("/v1/events", JSON, dumped(pod="pod-b", model="m", dp_rank=1, seq=5, events=[]))
    counts: list[tuple[dict[str, Any], int]] = [
        ({}, 12),
        ({"pods": ["pod-b", "nobody"]}, 4),
        ({"pods": []}, 0),
        ({"block_size": 4}, 12),
        ({"block_size": 32}, 1),
    ]
    for extra, count in counts:
        answer = pair.ask("/v1/match", JSON, dumped(model="m", token_ids=prompt, **extra))
        assert (answer.status_code, len(answer.json()["matches"])) == (200, count)
    states = {
        row["state"]
        for row in pair.ask("/v1/match", JSON, dumped(model="m", token_ids=prompt)).json()["matches"]
    }
    assert states == {"live", "degraded"}
    pair.check_state()
    pair.close()
