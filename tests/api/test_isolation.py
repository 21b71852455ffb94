"""Nothing that is held under one model, adapter, salt, image or rank is ever found under another.

Worlds are drawn at random and filled with prompts that are equal on purpose; what a query may find is only what was
stored in exactly its world.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from tests.api.conftest import Indexer, stored

TOKENS = list(range(100, 116))  # four blocks

# The model, the adapter as events say it, the salt, and an image (name, offset) in the second block.
models = st.sampled_from(["m", "n"])
adapters = st.sampled_from([None, "sql", "1", 1, 2, "m"])
salts = st.sampled_from([None, "t", "u", "sql", "1"])
images = st.sampled_from([None, ("img-a", 0), ("img-a", 1), ("img-b", 0)])
worlds = st.tuples(models, adapters, salts, images)
# Worlds that are equal, or differ in one place only, are the hard ones: what is asked is made from what is held.
changes = st.tuples(st.integers(0, 4), worlds)
World = tuple[str, str | int | None, str | None, tuple[str, int] | None]


def canonical(world: World) -> World:
    """An adapter by its number is the one that is named by that number."""
    model, adapter, salt, image = world
    return model, None if adapter is None else str(adapter), salt, image


def event_of(world: World, first_hash: int) -> dict[str, Any]:
    """As an engine publishes it: the adapter's name before all other keys, the salt in the first block alone."""
    _, adapter, salt, image = world
    name = {"lora_name": adapter} if isinstance(adapter, str) else {"lora_id": adapter}
    lora = [adapter] if isinstance(adapter, str) else []
    keys: list[list[Any] | None] = [[*lora] for _ in range(4)]
    if image is not None:
        keys[1] = [*lora, list(image)]
    if salt is not None:
        keys[0] = [*(keys[0] or []), salt]
    return stored(
        list(range(first_hash, first_hash + 4)), TOKENS, extra_keys=[key or None for key in keys], **name
    )


def query_of(world: World) -> dict[str, Any]:
    model, adapter, salt, image = world
    query: dict[str, Any] = {"model": model, "token_ids": TOKENS, "lora": adapter, "cache_salt": salt}
    if image is not None:
        query["extra_keys"] = [None, [list(image)]]
    return query


def changed(world: World, change: tuple[int, World]) -> World:
    """The world with one of its four places taken from another; 4 is no change."""
    place, other = change
    taken = [other if number == place else world for number in range(4)]
    return taken[0][0], taken[1][1], taken[2][2], taken[3][3]


def common(one: World, other: World) -> int:
    """Leading blocks that two worlds share: all, the one before the image, or none."""
    if canonical(one) == canonical(other):
        return 4
    return 1 if canonical(one)[:3] == canonical(other)[:3] else 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(held=st.lists(st.tuples(worlds, st.integers(0, 2)), min_size=1, max_size=6), change=changes)
def test_no_world_sees_another(
    indexer: Indexer, held: list[tuple[World, int]], change: tuple[int, World]
) -> None:
    asked = changed(held[0][0], change)
    for name in list(indexer.service.pods):
        indexer.service.drop_pod(name)
    expected: dict[tuple[str, int], int] = {}
    for number, (world, dp_rank) in enumerate(held):
        pod = f"pod-{world[0]}"  # a pod serves one model and any adapter
        response = indexer.events(event_of(world, 1 + 4 * number), pod=pod, model=world[0], dp_rank=dp_rank)
        assert response.json()["accepted"] == 1, response.text
        depth = common(world, asked)
        if depth:
            place = pod, dp_rank
            expected[place] = max(expected.get(place, 0), depth)
    query = query_of(asked)
    answers = [indexer.post("/v1/match", query).json()]
    answers += indexer.post("/v1/match/batch", {"queries": [query]}).json()["results"]
    for answer in answers:
        found = {(row["pod"], row["dp_rank"]): row["matched_blocks"] for row in answer["matches"]}
        assert found == expected
    made = indexer.post("/v1/hashes", query).json()["prefix_hashes"]
    by_hash = {"model": asked[0], "lora": asked[1], "prefix_hashes": made}
    found = {
        (row["pod"], row["dp_rank"]): row["matched_blocks"]
        for row in indexer.post("/v1/match", by_hash).json()["matches"]
    }
    assert found == expected


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(reserved=worlds, change=changes)
def test_no_world_sees_the_reservations_of_another(
    indexer: Indexer, reserved: World, change: tuple[int, World]
) -> None:
    asked = changed(reserved, change)
    for name in list(indexer.service.pods):
        indexer.service.drop_pod(name)
    for model in ("m", "n"):
        indexer.request("PUT", f"/v1/pods/pod-{model}", json={"model": model, "block_size": 4})
    answer = indexer.post("/v1/route", {**query_of(reserved), "reserve": True}).json()
    assert answer["reserved_blocks"] == 4
    rows = indexer.post("/v1/match", query_of(asked)).json()["matches"]
    found = {row["pod"]: row["speculative_blocks"] for row in rows}
    depth = common(reserved, asked)
    assert found == ({f"pod-{asked[0]}": depth} if depth else {})
    assert all(row["matched_blocks"] == 0 for row in rows), "announced is never confirmed"
