"""Owners: whom blocks were stored for, who asks without whom, and when a claim ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tests.api.conftest import CLEARED, Indexer, removed
from tests.api.test_fuzzy import A, B, C, ask, hold, joined


def post(
    indexer: Indexer, owner: str | None, names: list[int], *blocks: list[int], pod: str = "pod-a", **more: Any
) -> None:
    event = {"type": "BlockStored", "block_hashes": names, "token_ids": joined(blocks), "block_size": 16}
    said = {} if owner is None else {"owner": owner}
    response = indexer.events({"parent_block_hash": None, **event, **more}, pod=pod, **said)
    assert response.status_code == 200, response.text


def owned(answer: dict[str, Any]) -> list[list[tuple[str, list[str]]]]:
    return [[(match["pod"], match["owners"]) for match in block["matches"]] for block in answer["blocks"]]


def owners(indexer: Indexer) -> dict[str, int]:
    return {row["owner"]: row["blocks"] for row in indexer.get("/v1/owners").json()["owners"]}


def test_all_owners_of_a_block_are_kept_and_named(indexer: Indexer) -> None:
    post(indexer, "agent2", [1, 2], A, B)
    post(indexer, "agent1:system", [1], A)
    post(indexer, None, [1], A)  # nobody is told, nobody is forgotten
    answer = ask(indexer, A, B)
    assert owned(answer) == [[("pod-a", ["agent1:system", "agent2"])], [("pod-a", ["agent2"])]]
    assert [(row["owner"], row["reusable_blocks"]) for row in answer["owners"]] == [
        ("agent2", 2),
        ("agent1:system", 1),
    ]
    assert answer["owners"][0]["coverage"] == answer["owners"][0]["mean_confidence"] == 1.0
    assert owners(indexer) == {"agent1:system": 1, "agent2": 2}


def test_an_agent_asks_for_what_others_have(indexer: Indexer) -> None:
    post(indexer, "agent1", [1, 2], A, B)
    post(indexer, "agent1:tools", [3], C)
    post(indexer, "agent2", [1], A)
    post(indexer, "agent10", [1], A, pod="pod-b")
    everything = ask(indexer, A, B, C)
    assert [block["token_offset"] for block in everything["blocks"]] == [0, 16, 32]
    answer = ask(indexer, A, B, C, exclude=["agent1"])
    assert owned(answer) == [[("pod-a", ["agent2"]), ("pod-b", ["agent10"])]]
    assert [row["owner"] for row in answer["owners"]] == ["agent10", "agent2"]
    assert owned(ask(indexer, C, exclude=["agent1:tools"])) == []
    assert owned(ask(indexer, B, exclude=["agent1:tools"])) == [[("pod-a", ["agent1"])]]
    assert owned(ask(indexer, A, exclude=["agent2", "pod-b"])) == [[("pod-a", ["agent1"])]]


def test_what_is_held_for_nobody_is_everybodys(indexer: Indexer) -> None:
    post(indexer, None, [1], A)
    assert owned(ask(indexer, A, exclude=["agent1"])) == [[("pod-a", [])]]


def test_a_claim_ends_with_the_block_on_that_pod(indexer: Indexer) -> None:
    for pod in ("a", "b", "c", "d"):
        post(indexer, "agent1", [1, 2], A, B, pod=pod)
    indexer.events(removed(1), pod="a")
    post(indexer, None, [1], A, pod="a")
    assert owned(ask(indexer, A))[0][0] == ("a", []), "what comes back comes back without its owner"
    indexer.events(CLEARED, pod="b")  # and not swept
    post(indexer, None, [1], A, pod="b")
    assert owned(ask(indexer, A))[0][:2] == [("a", []), ("b", [])]
    indexer.request("DELETE", "/v1/pods/c")
    assert owned(ask(indexer, A))[0] == [("a", []), ("b", []), ("d", ["agent1"])]
    while not indexer.service._index.sweep(0, 10_000).idle:
        pass
    assert owners(indexer) == {"agent1": 1 + 2}, "B on pod a, both on pod d"
    indexer.clock.now_s += indexer.settings.ttl_s
    post(indexer, None, [1], A, pod="d")
    assert owned(ask(indexer, A)) == [[("d", [])]]


def test_a_block_that_waited_for_its_parent_has_its_owner(indexer: Indexer) -> None:
    post(indexer, "agent2", [2], B, parent_block_hash=1)
    post(indexer, "agent1", [1], A)
    assert owned(ask(indexer, A, B)) == [[("pod-a", ["agent1"])], [("pod-a", ["agent2"])]]


def test_an_owner_is_cleared_with_its_roles_and_the_blocks_stay(indexer: Indexer) -> None:
    post(indexer, "agent1", [1], A)
    post(indexer, "agent1:system", [1, 2], A, B)
    post(indexer, "agent10", [1], A)
    gone = indexer.request("DELETE", "/v1/owners/agent1")
    assert gone.json() == {
        "owners": [{"owner": "agent1", "blocks": 1}, {"owner": "agent1:system", "blocks": 2}]
    }
    assert owned(ask(indexer, A, B)) == [[("pod-a", ["agent10"])], [("pod-a", [])]]
    assert owners(indexer) == {"agent10": 1}
    missing = indexer.request("DELETE", "/v1/owners/agent1")
    assert missing.status_code == 404
    assert missing.json()["type"].endswith("unknown-owner")
    post(indexer, "agent1", [1], A)
    assert owned(ask(indexer, A)) == [[("pod-a", ["agent1", "agent10"])]]
    assert owners(indexer) == {"agent1": 1, "agent10": 1}


def test_an_engines_payload_has_its_owner_in_the_query(indexer: Indexer) -> None:
    payload = msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, A, 16]]])
    response = indexer.post(
        "/v1/events?pod=pod-a&model=m&owner=agent1:system",
        content=payload,
        headers={"Content-Type": "application/msgpack"},
    )
    assert response.status_code == 200, response.text
    assert owned(ask(indexer, A)) == [[("pod-a", ["agent1:system"])]]


def test_owners_are_bounded_and_those_without_blocks_make_room(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(owners_max=2)
    post(indexer, "a", [1], A)
    post(indexer, "b", [1], A)
    event = {"type": "BlockStored", "block_hashes": [2], "token_ids": B, "block_size": 16}
    refused = indexer.events(event, owner="c")
    assert refused.status_code == 422
    assert refused.json()["bound"] == "owners_max"
    assert ask(indexer, B)["blocks"] == [], "nothing was changed"
    assert "kvindexer_owners_refused_total 1.0" in indexer.get("/metrics").text
    post(indexer, "a", [1], A)
    indexer.events(removed(1, 1, 1))
    post(indexer, "c", [1], A)
    assert owners(indexer) == {"c": 1}


def test_claims_are_bounded_and_counted(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(owner_claims_max=1)
    post(indexer, "a", [1, 2], A, B)
    assert owned(ask(indexer, A, B)) == [[("pod-a", ["a"])], [("pod-a", [])]]
    said = indexer.get("/metrics").text
    assert "kvindexer_index_claims 1.0" in said
    assert "kvindexer_index_claims_refused_total 1.0" in said


def test_where_nobody_could_ask_nobody_owns(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(fuzzy=False)
    hold(indexer, [1], A)
    post(indexer, "agent1", [1], A)
    assert owners(indexer) == {}


def test_a_batch_for_every_pod_has_no_owner(indexer: Indexer) -> None:
    response = indexer.post(
        "/v1/events", {"pod": None, "model": "m", "events": [removed(1)], "owner": "agent1"}
    )
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "owner"


# -- across processes


def test_a_dump_has_them(indexer: Indexer, make_indexer: Callable[..., Indexer]) -> None:
    post(indexer, "agent2", [1, 2], A, B)
    post(indexer, "agent1:system", [1], A)
    post(indexer, "agent1", [1], A)
    post(indexer, "agent1", [3], C, medium="CPU")
    post(indexer, "agent2", [1], A, pod="pod-b")
    post(indexer, None, [7], C, pod="pod-b")
    other = make_indexer()
    lines = indexer.get("/v1/dump").text.splitlines()
    for _ in range(2):  # the same again changes nothing
        for line in lines:
            response = other.post(
                "/v1/events", content=line.encode(), headers={"content-type": "application/json"}
            )
            assert (response.status_code, response.json()["rejected"]) == (200, []), response.text
    assert owners(other) == owners(indexer) == {"agent1": 2, "agent1:system": 1, "agent2": 3}
    post(other, None, [1, 2], A, B)  # a dump has no contents: fuzzy matches find what comes with its tokens
    assert owned(ask(other, A, B)) == [
        [("pod-a", ["agent1", "agent1:system", "agent2"]), ("pod-b", ["agent2"])],
        [("pod-a", ["agent2"])],
    ]
    post(indexer, None, [1, 2], A, B)
    copies = [
        [event.get("copies") for event in map(msgspec.json.decode, lines) for event in event["events"]]
        for lines in (other.get("/v1/dump").text.splitlines(), indexer.get("/v1/dump").text.splitlines())
    ]
    assert copies[0] == copies[1] != [None] * len(copies[0])


def test_a_dump_into_an_indexer_with_less_room(
    indexer: Indexer, make_indexer: Callable[..., Indexer]
) -> None:
    for owner in ("a", "b", "c"):
        post(indexer, owner, [1], A)
    other = make_indexer(owners_max=2)
    for line in indexer.get("/v1/dump").text.splitlines():
        other.post("/v1/events", content=line.encode(), headers={"content-type": "application/json"})
    assert len(owners(other)) == 2
    assert "kvindexer_owners_refused_total 1.0" in other.get("/metrics").text
    without = make_indexer(fuzzy=False)
    for line in indexer.get("/v1/dump").text.splitlines():
        response = without.post(
            "/v1/events", content=line.encode(), headers={"content-type": "application/json"}
        )
        assert response.status_code == 200
    assert owners(without) == {}


def test_owners_of_a_dump_that_make_no_sense(indexer: Indexer) -> None:
    event: dict[str, Any] = {
        "type": "PrefixesStored",
        "block_hashes": [1, 2],
        "prefix_hashes": [11, 12],
        "block_size": 16,
    }
    for said in (
        7,
        "agent1",
        [{"owner": "", "blocks": [1]}],
        [{"owner": "a"}],
        [{"owner": "a\n", "blocks": []}],
    ):
        body = msgspec.json.encode({"pod": "pod-a", "model": "m", "events": [{**event, "owners": said}]})
        response = indexer.post("/v1/events", content=body, headers={"content-type": "application/json"})
        assert response.json()["stored_blocks"] == 2, "the blocks are there, for nobody"
        assert owners(indexer) == {}
    claims = [{"owner": "a", "blocks": [2, 99, 2]}, {"owner": "b", "blocks": []}]
    body = msgspec.json.encode({"pod": "pod-a", "model": "m", "events": [{**event, "owners": claims}]})
    indexer.post("/v1/events", content=body, headers={"content-type": "application/json"})
    assert owners(indexer) == {"a": 1}
