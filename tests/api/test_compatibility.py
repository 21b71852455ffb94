"""Routers of other systems: request bodies as their public documentation has them, answers that they read."""

from __future__ import annotations

import json
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.schemas.problems import Problem
from tests.api.conftest import Indexer, stored

TOKENS = list(range(1, 17))
MSGPACK = {"content-type": "application/msgpack"}

# As in the conductor's HTTP reference.
MOONCAKE = {
    "endpoint": "tcp://127.0.0.1:1",
    "replay_endpoint": "",
    "type": "vLLM",
    "modelname": "m",
    "lora_name": "",
    "tenant_id": "default",
    "instance_id": "engine-a",
    "block_size": 4,
    "dp_rank": 0,
    "cache_group": 0,
    "hash_profile": {"strategy": "vllm_v1", "algorithm": "sha256_cbor", "python_hash_seed": "0"},
}
# As in the documentation of the standalone indexer.
DYNAMO = {"instance_id": 7, "endpoint": "tcp://127.0.0.1:2", "model_name": "m", "block_size": 4}


def registered(indexer: Indexer, body: dict[str, Any], **changes: Any) -> Any:
    response = indexer.post("/register", {**body, **changes})
    assert response.is_success, response.text
    return response.json()


def stores(indexer: Indexer, pod: str, *events: dict[str, Any], **fields: Any) -> None:
    """What a registered rank published (its stream is not connected here)."""
    response = indexer.post("/v1/events", {"pod": pod, "events": list(events), **fields})
    assert response.status_code == 200, response.text


def instances(indexer: Indexer, **fields: Any) -> dict[str, Any]:
    response = indexer.post("/query", {"model_name": "m", "token_ids": TOKENS, **fields})
    assert response.status_code == 200, response.text
    shown: dict[str, Any] = response.json()["instances"]
    return shown


# -- registration


def test_each_system_gets_its_own_words(indexer: Indexer) -> None:
    response = indexer.post("/register", DYNAMO)
    assert (response.status_code, response.json()) == (201, {"status": "ok", "instance_id": 7})
    response = indexer.post("/register", MOONCAKE)
    assert response.status_code == 200
    assert response.json() == {"status": "registered successfully", "instance_id": "engine-a"}
    response = indexer.post("/unregister", {"instance_id": 7, "model_name": "m"})
    assert response.json() == {"status": "ok", "removed_instances": ["7|default|0"]}
    response = indexer.post("/unregister", {"instance_id": "engine-a", "dp_rank": 0})
    assert response.json() == {
        "status": "unregistered successfully",
        "removed_instances": ["engine-a|default|0"],
    }
    assert indexer.get("/workers").json() == []


def test_the_same_again_keeps_what_is_held(indexer: Indexer) -> None:
    registered(indexer, DYNAMO)
    stores(indexer, "7", stored([1], TOKENS[:4]))
    registered(indexer, DYNAMO)
    assert instances(indexer)["7"]["gpu"] == 4
    registered(indexer, DYNAMO, endpoint="tcp://127.0.0.1:3")
    assert instances(indexer) == {}


def test_workers_as_dynamo_lists_them(indexer: Indexer) -> None:
    registered(indexer, DYNAMO)
    registered(indexer, DYNAMO, endpoint="tcp://127.0.0.1:9", dp_rank=1)
    [row] = indexer.get("/workers").json()
    assert row == {
        "instance_id": 7,
        "source": "zmq",
        "status": "pending",
        "model_name": "m",
        "tenant_id": "default",
        "routing_group": "default",
        "block_size": 4,
        "endpoints": {"0": "tcp://127.0.0.1:2", "1": "tcp://127.0.0.1:9"},
        "listeners": {
            "0": {"endpoint": "tcp://127.0.0.1:2", "status": "pending", "state": "down"},
            "1": {"endpoint": "tcp://127.0.0.1:9", "status": "pending", "state": "down"},
        },
    }


def test_services_and_global_view_as_mooncake_shows_them(indexer: Indexer) -> None:
    registered(indexer, MOONCAKE)
    registered(
        indexer, MOONCAKE, dp_rank=1, endpoint="tcp://127.0.0.1:9", replay_endpoint="tcp://127.0.0.1:10"
    )
    shown = indexer.get("/services").json()
    assert shown["count"] == 2
    assert shown["services"][1] == {
        "Endpoint": "tcp://127.0.0.1:9",
        "ReplayEndpoint": "tcp://127.0.0.1:10",
        "Type": "",
        "ModelName": "m",
        "LoraName": "",
        "TenantID": "default",
        "InstanceID": "engine-a",
        "BlockSize": 4,
        "DPRank": 1,
        "CacheGroup": None,
        "HashProfile": None,
    }
    stores(indexer, "engine-a", stored([1, 2], TOKENS[:8]))
    assert indexer.get("/global_view").json() == {
        "context_count": 1,
        "contexts": [
            {
                "model_name": "m",
                "lora_name": "",
                "block_size": 4,
                "tenant_id": "default",
                "prefix_count": 2,
                "hash_profile": None,
                "instances": {"engine-a": [0, 1]},
            }
        ],
    }


def test_one_rank_is_unregistered_and_the_others_stay(indexer: Indexer) -> None:
    for rank in (0, 1, 2):
        registered(indexer, MOONCAKE, dp_rank=rank, endpoint=f"tcp://127.0.0.1:{rank + 1}")
    gone = indexer.post("/unregister", {"instance_id": "engine-a", "dp_rank": 1}).json()["removed_instances"]
    assert gone == ["engine-a|default|1"]
    assert {row["DPRank"] for row in indexer.get("/services").json()["services"]} == {0, 2}
    gone = indexer.post("/unregister", {"instance_id": "engine-a"}).json()["removed_instances"]
    assert gone == ["engine-a|default|0", "engine-a|default|2"]


@pytest.mark.parametrize(
    "body",
    [
        {"instance_id": "nobody"},
        {"instance_id": "engine-a", "dp_rank": 1},
        {"instance_id": "engine-a", "tenant_id": "acme"},
        {"instance_id": "engine-a", "routing_group": "eu"},
        {"instance_id": "engine-a", "model_name": "other"},
    ],
)
def test_unregistering_what_is_not_there(indexer: Indexer, body: dict[str, Any]) -> None:
    registered(indexer, MOONCAKE)
    assert indexer.post("/unregister", body).status_code == 404
    assert len(indexer.get("/workers").json()) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"type": "Mooncake"}, "Mooncake store"),
        ({"endpoint": "ipc:///tmp/x"}, "endpoint"),
        ({"instance_id": "a@rank=1"}, "@rank="),
        ({"instance_id": ""}, "instance_id"),
        ({"instance_id": -1}, "instance_id"),
        ({"instance_id": True}, "instance_id"),
        ({"tenant_id": "a@tenant=b"}, "@tenant="),
        ({"modelname": None}, "model_name"),
        ({"model_name": "other"}, "different models"),
        ({"dp_rank": -1}, "dp_rank"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_refused_registrations_change_nothing(indexer: Indexer, changes: dict[str, Any], said: str) -> None:
    response = indexer.post("/register", {**MOONCAKE, **changes})
    assert response.status_code == 422
    assert said in response.text
    assert indexer.get("/v1/pods").json() == {"pods": []}


def test_a_rank_of_a_whole_pod_is_not_registered_again(indexer: Indexer) -> None:
    indexer.request("PUT", "/v1/pods/engine-a", json={"model": "m", "dp_size": 2})
    response = indexer.post("/register", {**MOONCAKE, "dp_rank": 1})
    assert (response.status_code, "has a rank 1 already" in response.text) == (422, True)
    response = indexer.post("/unregister", {"instance_id": "engine-a", "dp_rank": 1})
    assert (response.status_code, "2 ranks as a whole" in response.text) == (422, True)
    gone = indexer.post("/unregister", {"instance_id": "engine-a"}).json()["removed_instances"]
    assert gone == ["engine-a|default|0", "engine-a|default|1"]


# -- queries


def test_tokens_by_rank_and_tier(indexer: Indexer) -> None:
    """The second example of the conductor's reference, in blocks of four."""
    registered(indexer, MOONCAKE)
    registered(indexer, MOONCAKE, dp_rank=1, endpoint="tcp://127.0.0.1:9")
    stores(
        indexer,
        "engine-a",
        stored([1, 2], TOKENS[:8]),
        stored([3], TOKENS[8:12], parent=2, medium="CPU"),
        stored([4], TOKENS[12:16], parent=3, medium="STORAGE"),
    )
    stores(indexer, "engine-a@rank=1", stored([1], TOKENS[:4], medium="CPU"))
    shown = indexer.post(
        "/query", {"model": "m", "block_size": 4, "token_ids": TOKENS, "cache_salt": None}
    ).json()
    assert shown == {
        "scores": {"engine-a": {"0": 8}},
        "frequencies": [],
        "instances": {
            "engine-a": {
                "longest_matched": 16,
                "gpu": 8,
                "dp": {"0": 8, "1": 0},
                "cpu": 12,
                "disk": 16,
                "rank_matches": {
                    "0": {"gpu": 8, "cpu": 12, "disk": 16},
                    "1": {"gpu": 0, "cpu": 4, "disk": 4},
                },
            }
        },
    }


def test_pods_registered_elsewhere_are_instances(indexer: Indexer) -> None:
    indexer.events(stored([1], TOKENS[:4]), pod="pod-a", dp_rank=2)
    assert instances(indexer)["pod-a"]["dp"] == {"2": 4}


def test_announced_blocks_are_no_match(indexer: Indexer) -> None:
    registered(indexer, DYNAMO)
    indexer.post("/v1/prefixes", {"model": "m", "pod": "7", "token_ids": TOKENS})
    assert instances(indexer) == {}


def test_one_instance(indexer: Indexer) -> None:
    for number in (7, 8):
        registered(indexer, DYNAMO, instance_id=number, endpoint=f"tcp://127.0.0.1:{number}")
        stores(indexer, str(number), stored([1], TOKENS[:4]))
    assert set(instances(indexer)) == {"7", "8"}
    assert set(instances(indexer, instance_id=8)) == set(instances(indexer, instance_id="8")) == {"8"}
    assert instances(indexer, instance_id=9) == {}


def test_an_unknown_model_has_no_instances(indexer: Indexer) -> None:
    assert indexer.post("/query", {"model_name": "m", "token_ids": [1]}).json() == {
        "scores": {},
        "frequencies": [],
        "instances": {},
    }


def test_adapter_and_salt(indexer: Indexer) -> None:
    registered(indexer, DYNAMO)
    stores(
        indexer,
        "7",
        stored([1], TOKENS[:4], lora_name="x"),
        stored([2, 3], TOKENS[:8], extra_keys=[["salt"], None]),
    )
    assert instances(indexer) == {}
    assert instances(indexer, lora_name="x")["7"]["gpu"] == 4
    assert instances(indexer, cache_salt="salt")["7"]["gpu"] == 8
    assert instances(indexer, cache_salt="other") == {}


def test_an_instance_of_one_adapter(indexer: Indexer) -> None:
    registered(indexer, MOONCAKE, lora_name="sql-adapter")
    stores(indexer, "engine-a", stored([1], TOKENS[:4]))
    assert instances(indexer) == {}
    assert instances(indexer, lora_name="sql-adapter")["engine-a"]["gpu"] == 4


@pytest.mark.parametrize("field", ["tenant_id", "routing_group"])
def test_tenants_do_not_see_each_other(indexer: Indexer, field: str) -> None:
    """The same instance id, model, tokens and engine hashes: nothing of one is ever an answer to another."""
    held = {None: 4, "acme": 8, "globex": 12}
    for number, (tenant, tokens) in enumerate(held.items()):
        said = {} if tenant is None else {field: tenant}
        registered(indexer, DYNAMO, endpoint=f"tcp://127.0.0.1:{number + 1}", **said)
        pod = "7" if tenant is None else f"7@{'tenant' if field == 'tenant_id' else 'group'}={tenant}"
        stores(indexer, pod, stored(list(range(1, tokens // 4 + 1)), TOKENS[:tokens]))
    for tenant, tokens in held.items():
        said = {} if tenant is None else {field: tenant}
        assert instances(indexer, **said)["7"]["gpu"] == tokens
        hashes = indexer.post("/v1/hashes", {"model": "m", "token_ids": TOKENS, "block_size": 4}).json()[
            "prefix_hashes"
        ]
        by_hash = indexer.post("/query_by_hash", {"model_name": "m", "block_hashes": hashes, **said}).json()[
            "instances"
        ]
        assert set(by_hash) == ({"7"} if tenant is None else set())
        lookup = indexer.post("/lookup", {"tokens": TOKENS, **said}).json()["layout_info"]
        assert lookup == {"7": ["gpu", tokens]}
    assert instances(indexer, **{field: "nobody"}) == {}
    gone = indexer.post("/unregister", {"instance_id": 7, "model_name": "m", field: "acme"})
    assert gone.is_success
    assert (instances(indexer)["7"]["gpu"], instances(indexer, **{field: "globex"})["7"]["gpu"]) == (4, 12)


def test_a_tenant_cannot_be_spelt_into_a_model(indexer: Indexer) -> None:
    registered(indexer, DYNAMO, tenant_id="acme")
    stores(indexer, "7@tenant=acme", stored([1], TOKENS[:4]))
    response = indexer.post("/query", {"model_name": "m@tenant=acme", "token_ids": TOKENS})
    assert response.status_code == 422


@pytest.mark.parametrize("field", ["block_hashes", "seq_hashes"])
def test_by_hash_signed_or_not(indexer: Indexer, field: str) -> None:
    registered(indexer, DYNAMO)
    stores(indexer, "7", stored([1, 2, 3], TOKENS[:12]))
    hashes = indexer.post("/v1/hashes", {"model": "m", "token_ids": TOKENS}).json()["prefix_hashes"]
    signed = [number - 2**64 if number >= 2**63 else number for number in hashes]
    for numbers in (hashes, signed):
        shown = indexer.post("/query_by_hash", {"model_name": "m", field: numbers}).json()
        assert shown["scores"] == {"7": {"0": 12}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/query", {"model_name": "m"}),
        ("/query", {"model_name": "m", "token_ids": None}),
        ("/query", {"model_name": "m", "token_ids": [-1]}),
        ("/query", {"model_name": "m", "token_ids": ["1"]}),
        ("/query", {"token_ids": [1]}),
        ("/query_by_hash", {"model_name": "m"}),
        ("/query_by_hash", {"model_name": "m", "block_hashes": [1], "seq_hashes": [1]}),
        ("/query_by_hash", {"model_name": "m", "block_hashes": [2**64]}),
        ("/lookup", {}),
        ("/lookup", {"tokens": [1.5]}),
    ],
)
def test_refused_queries(indexer: Indexer, path: str, body: dict[str, Any]) -> None:
    response = indexer.post(path, body)
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"]


def test_too_many_tokens(make_indexer: Any) -> None:
    small = make_indexer(tokens_max=8)
    assert small.post("/query", {"model_name": "m", "token_ids": TOKENS}).json()["bound"] == "tokens_max"
    packed = msgspec.msgpack.encode({"model": "m", "token_ids": b"\0" * 64})
    assert small.post("/query", content=packed, headers=MSGPACK).json()["bound"] == "tokens_max"


def test_msgpack_with_packed_tokens_as_mooncake_sends_it(indexer: Indexer) -> None:
    registered(indexer, MOONCAKE)
    stores(indexer, "engine-a", stored([1, 2], TOKENS[:8]))
    packed = struct.pack(f"<{len(TOKENS)}i", *TOKENS)
    for token_ids in (packed, TOKENS):
        body = {
            "model": "m",
            "lora_name": "",
            "tenant_id": "default",
            "block_size": 4,
            "token_ids": token_ids,
        }
        response = indexer.post("/query", content=msgspec.msgpack.encode(body), headers=MSGPACK)
        assert response.headers["content-type"] == "application/msgpack"
        assert msgspec.msgpack.decode(response.content)["scores"] == {"engine-a": {"0": 8}}
    response = indexer.post(
        "/query", content=msgspec.msgpack.encode(body), headers={**MSGPACK, "accept": "application/json"}
    )
    assert response.json()["scores"] == {"engine-a": {"0": 8}}
    odd = msgspec.msgpack.encode({"model": "m", "token_ids": b"123"})
    assert indexer.post("/query", content=odd, headers=MSGPACK).status_code == 422


# -- LMCache


def test_lookup_names_the_tier_that_completes_the_match(indexer: Indexer) -> None:
    indexer.events(stored([1, 2], TOKENS[:8]), pod="lmcache_default_instance")
    indexer.events(
        stored([1], TOKENS[:4]), stored([2, 3], TOKENS[4:12], parent=1, medium="cpu"), pod="other", model="m2"
    )
    indexer.events(stored([9], [99, 99, 99, 99]), pod="elsewhere")
    shown = indexer.post("/lookup", {"tokens": TOKENS}).json()
    assert shown["event_id"].startswith("Lookup")
    assert list(shown["layout_info"].items()) == [
        ("other", ["cpu", 12]),
        ("lmcache_default_instance", ["gpu", 8]),
    ]
    only = indexer.post("/lookup", {"tokens": TOKENS, "model": "m"}).json()["layout_info"]
    assert only == {"lmcache_default_instance": ["gpu", 8]}
    assert indexer.post("/lookup", {"tokens": []}).json()["layout_info"] == {}


def test_lookup_through_too_many_models_asks_for_one(indexer: Indexer) -> None:
    for number in range(65):
        indexer.request("PUT", f"/v1/pods/pod-{number}", json={"model": f"m{number}"})
    response = indexer.post("/lookup", {"tokens": TOKENS})
    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, "model")
    assert indexer.post("/lookup", {"tokens": TOKENS, "model": "m1"}).is_success


# -- whatever comes

PATHS = ["/register", "/unregister", "/query", "/query_by_hash", "/lookup"]
NAMES = [
    "instance_id", "endpoint", "replay_endpoint", "model_name", "modelname", "model", "tenant_id", "routing_group",
    "lora_name", "block_size", "dp_rank", "type", "cache_salt", "token_ids", "tokens", "block_hashes", "seq_hashes",
    "hash_profile",
]  # fmt: skip
LIKELY: st.SearchStrategy[Any] = st.sampled_from(
    ["m", "default", "", "7", 7, 0, 1, -1, None, True, [], [1, 2, 3, 4], {}, "tcp://127.0.0.1:1"]
)
WEIRD: st.SearchStrategy[Any] = st.sampled_from(
    [
        "\ud800",
        "é\0",
        "@rank=1",
        "x@tenant=",
        "tcp://*:1",
        2**64,
        -(2**63),
        1e300,
        [2**32],
        [[1]],
        ["a"],
        {"a": []},
    ]
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(PATHS), st.dictionaries(st.sampled_from(NAMES), LIKELY | WEIRD, max_size=8), st.booleans()
)
def test_no_body_is_our_fault(indexer: Indexer, path: str, body: dict[str, Any], packed: bool) -> None:
    """Any mixture of likely and weird values is answered, or refused with a problem that says why."""
    if packed:
        try:
            content = msgspec.msgpack.encode(body)
        except (UnicodeEncodeError, OverflowError):
            return
        response = indexer.post(path, content=content, headers=MSGPACK)
    else:
        response = indexer.post(
            path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
        )
    assert response.status_code < 500, (path, body, response.text)
    if response.is_error:
        Problem.model_validate(response.json(), strict=True)
    for listing in ("/workers", "/services", "/global_view"):
        assert indexer.get(listing).is_success
