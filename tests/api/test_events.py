"""Batches by HTTP: JSON and the payload of an engine, one after the other and wrong ones."""

from __future__ import annotations

import array
import asyncio
import base64
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.hashing import prefix_hashes
from app.index.interface import LISTED_A_SLICE
from app.schemas.events import EventsResponse
from tests.api.conftest import CLEARED, Indexer, removed, stored

TOKENS = list(range(100, 116))


def test_batch_is_seen_by_the_next_match(indexer: Indexer) -> None:
    response = indexer.events(stored([1, 2, 3, 4], TOKENS), removed(4), seq=0)
    assert response.status_code == 200
    assert response.json() == {
        "accepted": 2,
        "stored_blocks": 4,
        "removed_blocks": 1,
        "orphans": 0,
        "ignored": 0,
        "rejected": [],
        "duplicate": False,
    }
    EventsResponse.model_validate(response.json(), strict=True)
    assert indexer.depths(TOKENS) == {"pod-a": 3}


def test_removal_from_every_pod(indexer: Indexer) -> None:
    for pod, model in (("pod-a", "m"), ("pod-b", "m"), ("pod-c", "n")):
        indexer.events(stored([1, 2, 3], TOKENS[:12]), pod=pod, model=model)
    body = {"pod": None, "model": "m", "events": [removed(3), removed(2, 9)]}
    response = indexer.post("/v1/events", body)
    assert response.status_code == 200, response.text
    EventsResponse.model_validate(response.json(), strict=True)
    assert (response.json()["accepted"], response.json()["removed_blocks"]) == (2, 4)
    assert indexer.depths(TOKENS) == {"pod-a": 1, "pod-b": 1}
    assert indexer.depths(TOKENS, model="n") == {"pod-c": 3}


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"model": None}, "model"),
        ({"seq": 3}, "seq"),
        ({"dp_rank": 0}, "dp_rank"),
        ({"events": [removed(1), stored([9], TOKENS[:4])]}, "events"),
        ({"events": [removed(1), CLEARED]}, "events"),
        ({"events": [removed(1), {"type": "BlockRemoved"}]}, "events[1]"),
    ],
)
def test_batch_for_every_pod_that_cannot_be(indexer: Indexer, fields: Any, place: str) -> None:
    indexer.events(stored([1, 2], TOKENS[:8]))
    body = {"pod": None, "model": "m", "events": [removed(1)], **fields}
    response = indexer.post("/v1/events", body)
    assert response.status_code == 422, response.text
    assert response.json()["errors"][0]["field"] == place
    assert indexer.depths(TOKENS) == {"pod-a": 2}, "all of it or nothing"


def test_unfinished_chunk_is_accepted_and_ignored(indexer: Indexer) -> None:
    whole = stored([900], TOKENS[:8], block_size=8, medium="cpu")
    answer = indexer.events(whole, stored([901], TOKENS[8:12], parent=900, medium="cpu")).json()
    assert (answer["accepted"], answer["ignored"], answer["stored_blocks"]) == (2, 1, 1)


def test_clear(indexer: Indexer) -> None:
    indexer.events(stored([1, 2], TOKENS[:8]))
    assert indexer.events(CLEARED, stored([9], TOKENS[:4])).status_code == 200
    assert indexer.depths(TOKENS) == {"pod-a": 1}


def test_batch_seen_before_changes_nothing(indexer: Indexer) -> None:
    indexer.events(stored([1], TOKENS[:4]), seq=5)
    before = indexer.picture()
    response = indexer.events(CLEARED, seq=5)
    assert response.json()["duplicate"] is True
    assert response.json()["accepted"] == 0
    assert indexer.picture() == before


def test_other_batch_as_number_0_is_a_restarted_engine(indexer: Indexer) -> None:
    indexer.events(stored([1], TOKENS[:4]), seq=0)
    indexer.events(stored([2], TOKENS[4:8], parent=1), seq=1)
    assert indexer.events(stored([1], TOKENS[:4]), seq=0).json()["duplicate"] is True  # the same once more
    assert indexer.depths(TOKENS) == {"pod-a": 2}
    fresh = stored([7], TOKENS[8:12])
    assert indexer.events(fresh, seq=0).json()["duplicate"] is False
    assert indexer.depths(TOKENS) == {}
    assert indexer.depths(TOKENS[8:12]) == {"pod-a": 1}
    assert indexer.events(fresh, seq=0).json()["duplicate"] is True
    (rank,) = indexer.get("/v1/pods/pod-a").json()["ranks"]
    assert (rank["state"], rank["restarts"], rank["last_seq"]) == ("live", 1, 0)


@pytest.mark.parametrize("is_payload", [False, True], ids=["envelope", "payload"])
def test_a_restart_whose_number_0_got_lost_is_seen_by_its_stamps(indexer: Indexer, is_payload: bool) -> None:
    def post(number: int, ts: float) -> Any:
        event = stored([number], TOKENS[:4])
        if is_payload:
            return post_payload(indexer, payload(event, ts=ts), seq=number).json()
        return indexer.events(event, seq=number, ts=ts).json()

    for number in range(1, 6):  # all but the first go natively from their bytes into the index
        post(number, 100.0 + number)
    assert post(4, 104.0)["duplicate"] is True
    (rank,) = indexer.get("/v1/pods/pod-a").json()["ranks"]
    assert rank["state"] == "live"
    assert post(4, 110.0)["duplicate"] is True
    (rank,) = indexer.get("/v1/pods/pod-a").json()["ranks"]
    assert (rank["state"], rank["last_seq"]) == ("degraded", 5)
    assert rank["cause"].startswith("number 4 came again, stamped later than all up to number 5")


def test_a_time_in_the_query_goes_before_that_of_the_payload(indexer: Indexer) -> None:
    for number, ts in ((1, 101), (2, 102), (3, 103), (2, 110)):
        post_payload(indexer, payload(stored([number], TOKENS[:4]), ts=1.0), seq=number, ts=ts)
    (rank,) = indexer.get("/v1/pods/pod-a").json()["ranks"]
    assert rank["state"] == "degraded"


def test_gap_degrades_the_source(indexer: Indexer) -> None:
    indexer.events(stored([1], TOKENS[:4]), seq=5)
    indexer.events(stored([2], TOKENS[4:8], parent=1), seq=7)
    (rank,) = indexer.get("/v1/pods/pod-a").json()["ranks"]
    assert (rank["state"], rank["gaps"], rank["last_seq"]) == ("degraded", 1, 7)


def test_orphan_waits_for_its_parent(indexer: Indexer) -> None:
    response = indexer.events(stored([2], TOKENS[4:8], parent=1))
    assert response.json()["orphans"] == 1
    assert indexer.depths(TOKENS) == {}
    indexer.events(stored([1], TOKENS[:4]))
    assert indexer.depths(TOKENS) == {"pod-a": 2}


def test_bad_event_does_not_lose_its_batch(indexer: Indexer) -> None:
    response = indexer.events(
        stored([1], TOKENS[:4]),
        stored([2], TOKENS[4:7], parent=1),
        {"type": "BlockRenamed"},
        stored([3], TOKENS[4:8], parent=1),
    )
    assert response.status_code == 200
    answer = response.json()
    assert answer["accepted"] + len(answer["rejected"]) == 4
    assert 1 in [fault["index"] for fault in answer["rejected"]]
    assert all(fault["reason"] and fault["detail"] for fault in answer["rejected"])
    assert indexer.depths(TOKENS) == {"pod-a": 2}


def test_batch_of_bad_events_only_changes_nothing(indexer: Indexer) -> None:
    indexer.events(stored([1], TOKENS[:4]), seq=0)
    before = indexer.picture()
    response = indexer.events(stored([2], TOKENS[4:7], parent=1), removed(2**64), seq=1)
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert [fault["field"] for fault in response.json()["errors"]] == ["events[0]", "events[1]"]
    after = indexer.picture()
    for rank in after[3]["pods"][0]["ranks"]:
        rank["rejected"] = 0
    assert after == before
    assert indexer.events(stored([2], TOKENS[4:8], parent=1), seq=1).json()["duplicate"] is False


def test_bad_batch_does_not_register_its_pod(indexer: Indexer) -> None:
    assert indexer.events(stored([2], TOKENS[4:7])).status_code == 422
    assert indexer.get("/v1/pods").json() == {"pods": []}


def test_block_size_must_be_that_of_the_source(indexer: Indexer) -> None:
    indexer.events(stored([1], TOKENS[:4]))
    before = indexer.picture()
    response = indexer.events(stored([2], TOKENS[:8], block_size=8))
    assert response.status_code == 422
    assert "block_size" in response.json()["detail"]
    assert indexer.picture()[:3] == before[:3]


def test_empty_batch_registers_the_pod(indexer: Indexer) -> None:
    assert indexer.events().json()["accepted"] == 0
    assert [pod["pod"] for pod in indexer.get("/v1/pods").json()["pods"]] == ["pod-a"]


def test_unknown_pod_needs_a_model(indexer: Indexer) -> None:
    response = indexer.post("/v1/events", {"pod": "pod-z", "events": [CLEARED]})
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "model"
    indexer.events()
    assert indexer.post("/v1/events", {"pod": "pod-a", "events": [CLEARED]}).status_code == 200


def test_pod_of_another_model_is_refused(indexer: Indexer) -> None:
    indexer.events()
    assert indexer.events(model="other").status_code == 422


def test_lora_of_the_batch_is_that_of_its_events(indexer: Indexer) -> None:
    indexer.events(stored([1], TOKENS[:4]), lora="adapter")
    assert indexer.depths(TOKENS) == {}
    assert indexer.depths(TOKENS, lora="adapter") == {"pod-a": 1}


def test_ranks_are_kept_apart(indexer: Indexer) -> None:
    indexer.events(stored([1], TOKENS[:4]), dp_rank=0)
    indexer.events(stored([1, 2], TOKENS[:8]), dp_rank=1)
    rows = indexer.post("/v1/match", {"model": "m", "token_ids": TOKENS}).json()["matches"]
    assert [(row["dp_rank"], row["matched_blocks"]) for row in rows] == [(1, 2), (0, 1)]


def test_engine_hashes_may_be_negative_or_hex(indexer: Indexer) -> None:
    indexer.events(stored([-7], TOKENS[:4]))
    indexer.events({**stored([], TOKENS[4:8], parent=-7), "block_hashes": ["ab" * 32]})
    assert indexer.depths(TOKENS) == {"pod-a": 2}
    indexer.events({"type": "BlockRemoved", "block_hashes": ["ab" * 32]})
    assert indexer.depths(TOKENS) == {"pod-a": 1}


def test_unknown_fields_pass_inside_events_only(indexer: Indexer) -> None:
    assert indexer.events(stored([1], TOKENS[:4], invented=[{"deep": 1}])).status_code == 200
    response = indexer.events(stored([1], TOKENS[:4]), invented=1)
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "invented"


@pytest.mark.parametrize("ts", [-5, -0.5, -1e308])
def test_a_time_that_cannot_be_is_refused(indexer: Indexer, ts: float) -> None:
    indexer.events(stored([1], TOKENS[:4]), ts=1.0)
    before = indexer.picture()
    response = indexer.events(stored([2], TOKENS[4:8], parent=1), ts=ts)
    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, "ts")
    assert indexer.picture() == before
    assert lags(indexer) == 1


def lags(indexer: Indexer) -> float:
    """Batches whose lag was observed, where the sum of their lags is a number."""
    found = dict(line.rsplit(" ", 1) for line in indexer.get("/metrics").text.splitlines() if line[0] != "#")
    assert math.isfinite(float(found["kvindexer_event_lag_seconds_sum"]))
    return float(found["kvindexer_event_lag_seconds_count"])


# -- the payload of an engine


def payload(*events: Any, ts: float = 1.0, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), rank])


def post_payload(indexer: Indexer, body: bytes, **query: Any) -> Any:
    return indexer.post(
        "/v1/events",
        content=body,
        params={"pod": "pod-a", "model": "m", **query},
        headers={"content-type": "application/msgpack"},
    )


@pytest.mark.parametrize(
    "event",
    [
        ["BlockStored", [1, 2], None, TOKENS[:8], 4, None, "GPU", None],
        ["BlockStored", [1, 2], None, TOKENS[:8], 4, None],
        stored([1, 2], TOKENS[:8], medium="GPU"),
    ],
    ids=["array", "short array", "map"],
)
def test_payload(indexer: Indexer, event: Any) -> None:
    response = post_payload(indexer, payload(event), seq=0)
    assert response.status_code == 200, response.text
    assert response.json()["stored_blocks"] == 2
    assert indexer.depths(TOKENS) == {"pod-a": 2}


@pytest.mark.parametrize("ts", [math.nan, math.inf, -math.inf, -5, -5.0, -1e308])
def test_a_payload_whose_time_cannot_be_counts_and_has_no_lag(indexer: Indexer, ts: float) -> None:
    post_payload(indexer, payload(stored([1], TOKENS[:4])))
    assert lags(indexer) == 1
    for _ in range(2):  # two of -1e308 have a sum that is no number
        response = post_payload(indexer, payload(stored([2], TOKENS[4:8], parent=1), ts=ts))
        assert (response.status_code, response.json()["stored_blocks"]) == (200, 1)
    assert indexer.depths(TOKENS) == {"pod-a": 2}
    assert lags(indexer) == 1


def test_rank_of_a_payload_counts_unless_the_query_names_one(indexer: Indexer) -> None:
    post_payload(indexer, payload(CLEARED, rank=3))
    post_payload(indexer, payload(CLEARED, rank=3), dp_rank=1)
    ranks = indexer.get("/v1/pods/pod-a").json()["ranks"]
    spoke = [rank["dp_rank"] for rank in ranks if rank["last_event_age_s"] is not None]
    assert spoke == [1, 3]


def test_a_payload_is_read_by_the_block_size_of_its_own_rank(indexer: Indexer) -> None:
    post_payload(indexer, payload(stored([1], TOKENS[:4]), rank=0))
    post_payload(indexer, payload(stored([1], TOKENS[:8], block_size=8), rank=1))
    for event in (
        stored([2], TOKENS[:8], block_size=8),
        stored([3], TOKENS[:8], block_size=8, extra_keys=[["salt"]]),  # which the general way decodes
    ):
        response = post_payload(indexer, payload(event, rank=1))
        assert (response.status_code, response.json().get("stored_blocks")) == (200, 1), response.text
    assert post_payload(indexer, payload(stored([2], TOKENS[:4]), rank=1)).status_code == 422


def test_payload_needs_the_pod(indexer: Indexer) -> None:
    response = indexer.post(
        "/v1/events", content=payload(CLEARED), headers={"content-type": "application/msgpack"}
    )
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "pod"


def test_captured_frames_of_a_real_engine(indexer: Indexer) -> None:
    """Every live frame of a capture, as its publisher sent it, over the raw body."""
    capture = Path(__file__).parent.parent / "data" / "captures" / "core" / "v0.33.0.jsonl"
    lines = [json.loads(line) for line in capture.read_text().splitlines()]
    frames = [
        [base64.b64decode(frame) for frame in line["frames"]] for line in lines if line["kind"] == "event"
    ]
    assert len(frames) > 50
    stored_blocks = 0
    for _topic, seq, body in frames:
        response = post_payload(indexer, body, seq=int.from_bytes(seq, "big"))
        assert response.status_code == 200, response.text
        assert response.json()["rejected"] == []
        stored_blocks += response.json()["stored_blocks"]
    (rank,) = indexer.get("/v1/pods/pod-a").json()["ranks"]
    assert (rank["last_seq"], rank["gaps"], rank["state"]) == (len(frames) - 1, 0, "live")
    assert stored_blocks >= rank["blocks"]["gpu"] > 0


def test_events_bound(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(events_max=2)
    assert indexer.events(CLEARED, CLEARED).status_code == 200
    response = indexer.events(CLEARED, CLEARED, CLEARED)
    assert (response.status_code, response.json()["bound"]) == (422, "events_max")
    response = post_payload(indexer, payload(CLEARED, CLEARED, CLEARED))
    assert (response.status_code, response.json()["bound"]) == (422, "events_max")


def test_pods_bound(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(pods_max=1)
    assert indexer.events(pod="pod-a").status_code == 200
    response = indexer.events(pod="pod-b")
    assert (response.status_code, response.json()["bound"]) == (422, "pods_max")


def prefixes(**fields: Any) -> dict[str, Any]:
    return {
        "type": "PrefixesStored",
        "block_hashes": [1, 2],
        "prefix_hashes": [11, 12],
        "block_size": 4,
        **fields,
    }


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prefix_hashes": [11]}, "1 prefix hashes for 2 blocks"),
        ({"prefix_hashes": None}, "prefix_hashes"),
        ({"prefix_hashes": [11, 2**64]}, "prefix_hashes"),
        ({"copies": [1]}, "1 numbers for 2 blocks"),
        ({"copies": [1, 0]}, "from 1 to"),
        ({"copies": [1, -1]}, "from 1 to"),
        ({"copies": "two"}, "copies"),
        ({"block_size": 0}, "0 tokens a block"),
        ({"block_size": 8}, "does not match 4"),
        ({"medium": "paper"}, "paper"),
    ],
)
def test_prefixes_that_cannot_be(indexer: Indexer, fields: dict[str, Any], said: str) -> None:
    assert indexer.events(stored([9], [1, 2, 3, 4])).status_code == 200
    before = indexer.service.stats()["index"]
    response = indexer.events(prefixes(**fields))
    assert response.status_code == 422
    assert said in response.json()["detail"]
    assert indexer.service.stats()["index"] == before


def test_prefixes_are_matched_by_hash(indexer: Indexer) -> None:
    """Even before any event of the pod has said its block size."""
    assert indexer.events(prefixes(copies=[1, 2])).json()["stored_blocks"] == 2
    answer = indexer.post("/v1/match", {"model": "m", "prefix_hashes": [11, 12]}).json()
    assert (answer["block_size"], answer["matches"][0]["matched_blocks"]) == (4, 2)
    assert indexer.get("/v1/pods/pod-a").json()["block_size"] == 4


def test_prefixes_are_of_the_adapter_that_they_name_and_of_no_other(indexer: Indexer) -> None:
    indexer.request("PUT", "/v1/pods/pod-a", json={"model": "m", "lora": "tuned"})
    assert indexer.events(prefixes(), lora="tuned").status_code == 200
    assert indexer.post("/v1/match", {"model": "m", "prefix_hashes": [11]}).json()["matches"]
    query = {"model": "m", "lora": "tuned", "prefix_hashes": [11], "block_size": 4}
    assert not indexer.post("/v1/match", query).json()["matches"]


def test_an_incomplete_picture_is_degraded_until_it_is_cleared(indexer: Indexer) -> None:
    indexer.events(stored([1], [1, 2, 3, 4]), incomplete=True)
    assert indexer.get("/v1/pods/pod-a").json()["ranks"][0]["state"] == "degraded"
    indexer.events(CLEARED)
    assert indexer.get("/v1/pods/pod-a").json()["ranks"][0]["state"] == "live"


def test_others_have_their_turn_while_a_dump_waits(indexer: Indexer) -> None:
    """Its prefixes have no chain, so all that is held has to be found by its hash first: not in one go."""
    names, size = 16_384, 4
    for first in range(0, 4 * names, names):
        tokens = list(range(first, first + names * size))
        assert indexer.events(stored(list(range(first, first + names)), tokens)).status_code == 200
    packed = prefix_hashes("m", None, size, array.array("I", range(2 * size)).tobytes(), None)
    known = array.array("Q", packed).tolist()

    async def others() -> int:
        body = {"pod": "pod-b", "model": "m", "events": [prefixes(prefix_hashes=known)]}
        post = asyncio.create_task(indexer.client.post("/v1/events", json=body))
        rounds = 0
        while not post.done():
            await asyncio.sleep(0)
            rounds += 1
        assert (await post).json()["stored_blocks"] == 2
        return rounds

    first, second = indexer.run(others()), indexer.run(others())
    assert first - second >= 4 * names // LISTED_A_SLICE - 1
    answer = indexer.post("/v1/match", {"model": "m", "token_ids": list(range(12))}).json()
    assert {row["pod"]: row["matched_blocks"] for row in answer["matches"]} == {"pod-a": 3, "pod-b": 2}


@pytest.mark.parametrize(
    "fields",
    [{"pod": "pod-z", "model": None}, {"model": "other"}, {"events": [prefixes(block_size=8)]}],
    ids=["no model", "other model", "nothing of it can be used"],
)
def test_a_dump_that_is_refused_changes_nothing_before(indexer: Indexer, fields: dict[str, Any]) -> None:
    """To list all takes memory, for ten minutes."""
    blocks = 3 * LISTED_A_SLICE
    indexer.events(stored(list(range(blocks)), list(range(4 * blocks))))
    body = {"pod": "pod-a", "model": "m", "events": [prefixes()], **fields}
    assert indexer.post("/v1/events", body).status_code == 422
    assert indexer.get("/v1/pods/pod-a").json()["ranks"][0]["rejected"] == ("events" in fields)
    assert len(list(indexer.service.listing())) >= 2, "nobody has begun with it"
    assert indexer.events(prefixes()).status_code == 200
    assert len(list(indexer.service.listing())) == 0


async def listing_begins(indexer: Indexer, bytes_before: int) -> None:
    for _ in range(1_000):
        if indexer.service.stats()["index"]["bytes"] > bytes_before:
            return
        await asyncio.sleep(0)
    raise AssertionError("nothing was listed")


def test_a_dump_whose_sender_goes_away_is_not_taken_in_part(indexer: Indexer) -> None:
    blocks = 3 * LISTED_A_SLICE
    indexer.events(stored(list(range(blocks)), list(range(4 * blocks))))
    body = {"pod": "pod-b", "model": "m", "seq": 0, "events": [prefixes()]}

    async def leave() -> None:
        post = asyncio.create_task(indexer.client.post("/v1/events", json=body))
        await listing_begins(indexer, before)
        assert not post.done()
        post.cancel()
        await asyncio.wait([post])
        assert post.cancelled()

    before = indexer.service.stats()["index"]["bytes"]
    indexer.run(leave())
    assert [pod["pod"] for pod in indexer.get("/v1/pods").json()["pods"]] == ["pod-a"]
    answer = indexer.post("/v1/events", body).json()
    assert (answer["duplicate"], answer["stored_blocks"]) == (False, 2)


def test_what_others_tell_while_a_dump_waits_is_kept(indexer: Indexer) -> None:
    """A pod that speaks on two connections at once: what was applied first came first."""
    blocks = 3 * LISTED_A_SLICE
    indexer.events(stored(list(range(blocks)), list(range(4 * blocks))))

    async def overtake() -> tuple[Any, Any]:
        dump = asyncio.create_task(indexer.client.post("/v1/events", json={**body, "events": [prefixes()]}))
        await listing_begins(indexer, before)
        told = await indexer.client.post("/v1/events", json={**body, "events": [stored([7], TOKENS[:4])]})
        assert not dump.done()
        return told.json(), (await dump).json()

    body = {"pod": "pod-b", "model": "m"}
    before = indexer.service.stats()["index"]["bytes"]
    told, dumped = indexer.run(overtake())
    assert (told["stored_blocks"], dumped["stored_blocks"]) == (1, 2)
    (rank,) = indexer.get("/v1/pods/pod-b").json()["ranks"]
    assert (rank["blocks"]["gpu"], rank["state"]) == (3, "live")
