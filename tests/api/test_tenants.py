"""No tenant learns what another's prompts left in a cache, by no route that reads.

Two ways to keep tenants apart, as engines and routers have them: a cache salt in the prompt, and a tenant that the
compatibility routes put into the context. All hold the same tokens here, so whatever is found of another is a leak.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from app.api.access import READ_POSTS
from tests.api.conftest import Indexer, stored

TOKENS = list(range(100, 132))  # eight blocks of 4
SALTS = [None, "acme-salt", "beta-salt"]
TENANTS = ["default", "acme", "beta"]


def pods_of_match(answer: Any) -> set[str]:
    return {row["pod"] for row in answer["matches"]}


def pods_of_route(answer: Any) -> set[str]:
    return {row["pod"] for row in answer["candidates"] if row["matched_blocks"] or row["speculative_blocks"]}


def pods_of_fuzzy(answer: Any) -> set[str]:
    return {row["pod"] for block in answer["blocks"] for row in block["matches"]}


def post(indexer: Indexer, path: str, body: dict[str, Any]) -> Any:
    response = indexer.post(path, body)
    assert response.status_code == 200, (path, response.text)
    return response.json()


@pytest.fixture
def salted(indexer: Indexer) -> Indexer:
    """A pod for each salt; each publishes it as engines do, in the first block alone."""
    for number, salt in enumerate(SALTS):
        keys = [[salt], *[None] * 7] if salt else None
        event = stored(list(range(10 * number, 10 * number + 8)), TOKENS, extra_keys=keys)
        assert indexer.events(event, pod=f"pod-of-{salt}").json()["stored_blocks"] == 8
    return indexer


def hashes(indexer: Indexer, salt: str | None) -> list[int]:
    body = {"model": "m", "token_ids": TOKENS, "cache_salt": salt}
    made: list[int] = post(indexer, "/v1/hashes", body)["prefix_hashes"]
    return made


# How each route is asked by the holder of a salt, and which pods its answer gives away.
BY_SALT: dict[str, Callable[[Indexer, str | None], set[str]]] = {
    "/v1/match": lambda indexer, salt: (
        pods_of_match(post(indexer, "/v1/match", {"model": "m", "token_ids": TOKENS, "cache_salt": salt}))
        | pods_of_match(post(indexer, "/v1/match", {"model": "m", "prefix_hashes": hashes(indexer, salt)}))
    ),
    "/v1/match/batch": lambda indexer, salt: pods_of_match(
        post(
            indexer,
            "/v1/match/batch",
            {"queries": [{"model": "m", "token_ids": TOKENS, "cache_salt": salt}]},
        )["results"][0]
    ),
    "/v1/route": lambda indexer, salt: pods_of_route(
        post(indexer, "/v1/route", {"model": "m", "token_ids": TOKENS, "cache_salt": salt, "reserve": False})
    ),
    "/query": lambda indexer, salt: set(
        post(indexer, "/query", {"model": "m", "token_ids": TOKENS, "cache_salt": salt})["instances"]
    ),
    "/query_by_hash": lambda indexer, salt: set(
        post(indexer, "/query_by_hash", {"model": "m", "block_hashes": hashes(indexer, salt)})["instances"]
    ),
    "/lookup": lambda indexer, salt: set(
        post(indexer, "/lookup", {"tokens": TOKENS, "cache_salt": salt})["layout_info"]
    ),
}
# Without a salt in its question, a fuzzy match must find what has none, and nothing else; hashes find nothing at all.
WITHOUT_SALT = {"/v1/fuzzy-match", "/v1/hashes"}


def test_every_route_that_reads_is_asked_here() -> None:
    assert set(BY_SALT) | WITHOUT_SALT == READ_POSTS


@pytest.mark.parametrize("path", BY_SALT)
@pytest.mark.parametrize("salt", SALTS)
def test_salts(salted: Indexer, path: str, salt: str | None) -> None:
    assert BY_SALT[path](salted, salt) == {f"pod-of-{salt}"}


@pytest.mark.parametrize("path", BY_SALT)
def test_salt_that_nobody_has(salted: Indexer, path: str) -> None:
    assert BY_SALT[path](salted, "gamma-salt") == set()


@pytest.mark.parametrize("mode", ["grid", "sliding"])
@pytest.mark.parametrize("distance", [0, 8])
def test_fuzzy_matches_leave_salted_blocks_out(salted: Indexer, mode: str, distance: int) -> None:
    body = {"model": "m", "token_ids": TOKENS, "mode": mode, "max_distance": distance, "limit_per_block": 64}
    assert pods_of_fuzzy(post(salted, "/v1/fuzzy-match", body)) == {"pod-of-None"}


def test_hashes_of_a_salt_cannot_be_had_without_it(salted: Indexer) -> None:
    made = [hashes(salted, salt) for salt in [*SALTS, "gamma-salt"]]
    assert len({one for chain in made for one in chain}) == sum(map(len, made))


def test_reservations_of_a_salt_are_its_own(salted: Indexer) -> None:
    for salt in SALTS:
        body: dict[str, Any] = {"model": "m", "token_ids": [7] * 16, "cache_salt": salt}
        if salt == "acme-salt":
            assert post(salted, "/v1/route", {**body, "reserve": True})["reserved_blocks"] == 4
    for salt in SALTS:
        body = {"model": "m", "token_ids": [7] * 16, "cache_salt": salt, "reserve": False}
        assert bool(pods_of_route(post(salted, "/v1/route", body))) == (salt == "acme-salt")


# -- tenants of the compatibility routes


@pytest.fixture
def tenanted(indexer: Indexer) -> Indexer:
    for number, tenant in enumerate(TENANTS):
        body = {
            "instance_id": f"engine-{tenant}",
            "endpoint": f"tcp://127.0.0.1:{number + 1}",
            "modelname": "m",
        }
        post(indexer, "/register", {**body, "block_size": 4, "tenant_id": tenant})
        name = f"engine-{tenant}" + (f"@tenant={tenant}" if tenant != "default" else "")
        response = indexer.post("/v1/events", {"pod": name, "events": [stored(list(range(8)), TOKENS)]})
        assert response.json()["stored_blocks"] == 8
    return indexer


BY_TENANT: dict[str, Callable[[Indexer, str], set[str]]] = {
    "/query": lambda indexer, tenant: set(
        post(indexer, "/query", {"model": "m", "token_ids": TOKENS, "tenant_id": tenant})["instances"]
    ),
    "/lookup": lambda indexer, tenant: (
        set(post(indexer, "/lookup", {"tokens": TOKENS, "tenant_id": tenant})["layout_info"])
        | set(post(indexer, "/lookup", {"tokens": TOKENS, "tenant_id": tenant, "model": "m"})["layout_info"])
    ),
}


@pytest.mark.parametrize("path", BY_TENANT)
@pytest.mark.parametrize("tenant", [*TENANTS, "gamma"])
def test_tenants(tenanted: Indexer, path: str, tenant: str) -> None:
    assert BY_TENANT[path](tenanted, tenant) == ({f"engine-{tenant}"} if tenant in TENANTS else set())


@pytest.mark.parametrize("asker", TENANTS)
@pytest.mark.parametrize("owner", TENANTS)
def test_not_even_hashes_reach_another_tenant(tenanted: Indexer, asker: str, owner: str) -> None:
    """What another tenant's hashes are may be known; the context still has to be one's own."""
    model = "m" if owner == "default" else f"m@tenant={owner}"
    theirs = post(tenanted, "/v1/hashes", {"model": model, "token_ids": TOKENS})["prefix_hashes"]
    body = {"model": "m", "block_hashes": theirs, "tenant_id": asker}
    found = set(post(tenanted, "/query_by_hash", body)["instances"])
    assert found == ({f"engine-{owner}"} if asker == owner else set())


@pytest.mark.parametrize("path", ["/v1/match", "/v1/route", "/v1/fuzzy-match"])
def test_tenants_are_contexts_on_our_own_routes(tenanted: Indexer, path: str) -> None:
    read = {"/v1/match": pods_of_match, "/v1/route": pods_of_route, "/v1/fuzzy-match": pods_of_fuzzy}[path]
    for tenant in TENANTS:
        model, pod = "m", f"engine-{tenant}"
        if tenant != "default":
            model, pod = f"m@tenant={tenant}", f"{pod}@tenant={tenant}"
        assert read(post(tenanted, path, {"model": model, "token_ids": TOKENS})) == {pod}


@pytest.mark.parametrize(
    "changes",
    [{"model": "m@tenant=acme"}, {"tenant_id": "x@tenant=acme"}, {"routing_group": "x@tenant=acme"}],
)
def test_tenant_cannot_be_spelt_into_another(tenanted: Indexer, changes: dict[str, str]) -> None:
    for path, body in [
        ("/query", {"model": "m", "token_ids": TOKENS}),
        ("/lookup", {"model": "m", "tokens": TOKENS}),
        ("/query_by_hash", {"model": "m", "block_hashes": [1]}),
    ]:
        response = tenanted.post(path, {**body, **changes})
        assert response.status_code == 422, (path, response.text)
