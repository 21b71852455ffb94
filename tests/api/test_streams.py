"""The dump, which another indexer takes and then cannot be told from the first; and the feed of what happens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.api.conftest import CLEARED, Indexer, removed, stored

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
OTHER = [1, 2, 3, 4, 50, 60, 70, 80]


def fill(indexer: Indexer) -> None:
    """Two pods, ranks, tiers, groups, adapters, salts, copies, engine hashes of every kind."""
    assert indexer.events(stored([1, 2, 3], PROMPT), seq=5).status_code == 200
    indexer.events(
        stored([2], [5, 6, 7, 8], parent=1),  # a second copy
        stored([-4], [50, 60, 70, 80], parent=1),
        stored([2**63 + 9], [1, 2, 3, 4], lora_name="tuned"),
        stored([7], [1, 2, 3, 4], medium="CPU"),
        stored([8], [1, 2, 3, 4], group_idx=1, kv_cache_spec_kind="full_attention"),
        stored([9], [1, 2, 3, 4], extra_keys=[["salt"]]),
        seq=6,
    )
    indexer.events(stored([1, 2], PROMPT[:8]), pod="pod-b", dp_rank=3)
    assert indexer.request("PUT", "/v1/pods/pod-c", json={"model": "m"}).status_code == 200


def dump(indexer: Indexer, **query: Any) -> list[dict[str, Any]]:
    response = indexer.get("/v1/dump", params=query)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def take(indexer: Indexer, lines: list[dict[str, Any]]) -> None:
    for line in lines:
        response = indexer.post("/v1/events", line)
        assert response.status_code == 200, response.text
        assert response.json()["rejected"] == []


QUERIES: list[dict[str, Any]] = [
    {"token_ids": PROMPT},
    {"token_ids": OTHER},
    {"token_ids": PROMPT, "lora": "tuned"},
    {"token_ids": PROMPT, "cache_salt": "salt"},
]


def matches(indexer: Indexer) -> list[Any]:
    answers = [indexer.post("/v1/match", {"model": "m", **query}).json() for query in QUERIES]
    for answer in answers:
        for row in answer["matches"]:
            del row["last_event_age_s"]
    return answers


def test_round_trip(make_indexer: Callable[..., Indexer]) -> None:
    first, second = make_indexer(), make_indexer()
    fill(first)
    lines = dump(first)
    take(second, lines)
    assert matches(second) == matches(first)
    assert all(answer["matches"] for answer in matches(first))
    # Removals behave alike: one copy of 2 stays, and so does every other pod's.
    for events in [removed(2)], [removed(2)], [removed(-4), removed(7, medium="CPU")], [removed(2**63 + 9)]:
        answers = [indexer.events(*events).json() for indexer in (first, second)]
        assert answers[0] == answers[1]
        assert answers[0]["removed_blocks"] == len(events)
        assert matches(second) == matches(first)


def test_a_dump_taken_twice_changes_nothing(make_indexer: Callable[..., Indexer]) -> None:
    first, second = make_indexer(), make_indexer()
    fill(first)
    lines = dump(first)
    for _ in range(2):
        take(second, [line for line in lines if line["events"]])
    take(second, [line for line in lines if not line["events"]])
    assert matches(second) == matches(first)
    assert second.depths(PROMPT, pods=["pod-a"]) == {"pod-a": 3}
    for left in (3, 1):  # two copies, and not four
        assert second.events(removed(2)).json()["removed_blocks"] == 1
        assert second.depths(PROMPT, pods=["pod-a"]) == {"pod-a": left}


def test_a_dump_behind_batch_0_is_taken_twice(make_indexer: Callable[..., Indexer]) -> None:
    """Its last line has number 0 and no event: that is no engine that begins anew, here or where it came from."""
    first, second = make_indexer(), make_indexer()
    first.events(stored([1, 2, 3], PROMPT), seq=0)
    lines = dump(first)
    for indexer in (second, second, first):
        take(indexer, lines)
        assert indexer.depths(PROMPT) == {"pod-a": 3}
        assert indexer.get("/v1/pods/pod-a").json()["ranks"][0]["restarts"] == 0
    # One that does begin anew is seen as ever.
    second.events(stored([7], OTHER[:4]), seq=0)
    assert second.depths(PROMPT) == {"pod-a": 1}


def test_batches_go_on_behind_the_dump(make_indexer: Callable[..., Indexer]) -> None:
    first, second = make_indexer(), make_indexer()
    fill(first)
    take(second, dump(first))
    ranks = {pod["pod"]: pod["ranks"] for pod in second.get("/v1/pods").json()["pods"]}
    assert [(rank["last_seq"], rank["state"]) for rank in ranks["pod-a"]] == [(6, "live")]
    assert [(rank["dp_rank"], rank["last_seq"]) for rank in ranks["pod-b"]] == [(0, None), (3, None)]
    assert [rank["state"] for rank in ranks["pod-c"]] == ["live"]
    assert second.events(stored([2], PROMPT[4:8], parent=1), seq=6).json()["duplicate"]
    assert second.events(stored([5], [13, 14, 15, 16], parent=3), seq=7).json()["stored_blocks"] == 1
    assert second.depths([*PROMPT, 13, 14, 15, 16], pods=["pod-a"]) == {"pod-a": 4}
    assert second.get("/v1/pods/pod-a").json()["ranks"][0]["gaps"] == 0


def test_blocks_are_told_of_these_pods_only(indexer: Indexer) -> None:
    fill(indexer)
    assert {line["pod"] for line in dump(indexer, pods="pod-a,pod-c")} == {"pod-a", "pod-c"}
    assert indexer.get("/v1/dump", params={"pods": "nobody"}).status_code == 404
    assert indexer.get("/v1/dump", params={"nonsense": "1"}).status_code == 422


def test_nothing_held(indexer: Indexer) -> None:
    assert dump(indexer) == []


def test_what_is_not_whole_says_so(make_indexer: Callable[..., Indexer]) -> None:
    """A gap before the dump, and blocks that wait for a parent: both end degraded in the indexer that takes it."""
    gap = {"events": [stored([3], PROMPT[8:], parent=2)], "seq": 9}
    orphan = {"events": [stored([30], PROMPT[8:], parent=29)]}
    for batch in (gap, orphan):
        first, second = make_indexer(), make_indexer()
        first.events(stored([1, 2], PROMPT[:8]), seq=5)
        assert first.post("/v1/events", {"pod": "pod-a", **batch}).status_code == 200
        take(second, dump(first))
        assert second.get("/v1/pods/pod-a").json()["ranks"][0]["state"] == "degraded"
        second.events(CLEARED)
        assert second.get("/v1/pods/pod-a").json()["ranks"][0]["state"] == "live"


def test_a_change_while_it_is_read_says_so(indexer: Indexer) -> None:
    indexer.events(stored([1], [1, 2, 3, 4]), seq=5)
    indexer.events(stored([1], [1, 2, 3, 4]), seq=5, pod="pod-b")
    dumps = indexer.service.dumps
    slices = dumps.begin(None)
    lines = next(slices)
    indexer.events(stored([2], [5, 6, 7, 8], parent=1), seq=6)
    lines += b"".join(slices)
    dumps.end()
    last = {line["pod"]: line for line in map(json.loads, lines.splitlines()) if not line["events"]}
    assert (last["pod-a"].get("seq"), last["pod-a"].get("incomplete")) == (None, True)
    assert (last["pod-b"].get("seq"), last["pod-b"].get("incomplete")) == (5, None)


def test_pods_that_go_while_it_is_read_are_left_out(indexer: Indexer) -> None:
    fill(indexer)
    slices = indexer.service.dumps.begin(None)
    indexer.request("DELETE", "/v1/pods/pod-b")
    lines = [json.loads(line) for line in b"".join(slices).splitlines()]
    indexer.service.dumps.end()
    assert {line["pod"] for line in lines} == {"pod-a", "pod-c"}


def test_only_so_many_at_once(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(dumps_max=1)
    running = indexer.service.dumps.begin(None)
    refused = indexer.get("/v1/dump")
    assert refused.status_code == 503
    assert "dumps_max = 1" in refused.json()["detail"]
    assert list(running) == [b""]
    indexer.service.dumps.end()
    assert indexer.get("/v1/dump").status_code == 200
    assert indexer.get("/v1/dump").status_code == 200  # each gave its place back
    assert indexer.service.stats()["streams"]["dumps_refused"] == 1


def test_slices_are_bounded(indexer: Indexer) -> None:
    """50,000 blocks come in pieces, none of them much longer than a slice of names."""
    for batch in range(10):
        first = batch * 5_000
        tokens = [token for block in range(first, first + 5_000) for token in (block, 0, 0, 0)]
        indexer.events(stored(list(range(first + 1, first + 5_001)), tokens))
    slices = list(indexer.service.dumps.begin(None))
    indexer.service.dumps.end()
    assert len(slices) > 20
    assert max(map(len, slices)) < 150_000
    blocks = sum(
        len(event["block_hashes"])
        for s in slices
        for line in s.splitlines()
        for event in json.loads(line)["events"]
    )
    assert blocks == 50_000
