"""docs/api.md: its routes are those of the OpenAPI document, its examples answer what it shows, its hashes are right."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import xxhash

from app.extra_keys import query_extra_keys
from app.hashing import context_seed, prefix_hashes
from tests.api_page import BEGIN, END, PAGE, routes, running, settled

VECTORS = json.loads((PAGE.parent / "hash_vectors.json").read_text())


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with running() as client:
        yield client


def recipe(language: str) -> list[str]:
    """The code blocks of the recipes in a language."""
    section = PAGE.read_text().split("\n## Recipes\n")[1].split("\n## Dumps\n")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, flags=re.DOTALL)


def test_routes_and_examples(http: httpx.Client) -> None:
    shown = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip()
    assert shown == routes(http).strip(), "run `python -m tests.api_page`"


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["say"])
def test_vectors(vector: dict[str, Any], http: httpx.Client) -> None:
    """By the text of the page alone, by the code, and by a running indexer."""
    model, lora, block_size, tokens = (vector[key] for key in ("model", "lora", "block_size", "token_ids"))
    expected = [int(value) for value in vector["prefix_hashes"]]
    assert len(expected) == len(tokens) // block_size

    seed = xxhash.xxh64_intdigest(msgspec.msgpack.encode([model, lora, block_size]), seed=0)
    assert str(seed) == vector["seed"]
    keys = [bytes.fromhex(text) for text in vector["extra_key_bytes"]]
    chain, hashes = seed, []
    for block in range(len(tokens) // block_size):
        content = struct.pack(f"<{block_size}I", *tokens[block * block_size : (block + 1) * block_size])
        chain = xxhash.xxh64_intdigest(content + (keys[block] if block < len(keys) else b""), seed=chain)
        hashes.append(chain)
    assert hashes == expected

    said = query_extra_keys(vector.get("extra_keys"), lora=lora, cache_salt=vector.get("cache_salt"))
    assert list(said or ()) == keys
    packed = prefix_hashes(model, lora, block_size, struct.pack(f"<{len(tokens)}I", *tokens), said)
    assert list(struct.unpack(f"<{len(packed) // 8}Q", packed)) == expected
    assert str(context_seed(model, lora, block_size)) == vector["seed"]

    body = {key: vector[key] for key in ("model", "lora", "block_size", "token_ids")}
    body |= {key: vector[key] for key in ("cache_salt", "extra_keys") if key in vector}
    assert http.post("/v1/hashes", json=body).json()["prefix_hashes"] == expected


def test_vectors_cover_the_rules() -> None:
    """An adapter, a salt, an image, a name past 31 bytes, a block size past 127, tokens that fill no block."""
    assert any(vector["lora"] for vector in VECTORS)
    assert any("cache_salt" in vector for vector in VECTORS)
    assert any("extra_keys" in vector for vector in VECTORS)
    assert any(len(vector["model"].encode()) > 31 for vector in VECTORS)
    assert any(vector["block_size"] > 127 for vector in VECTORS)
    assert any(len(vector["token_ids"]) % vector["block_size"] for vector in VECTORS)


def test_python_recipe(http: httpx.Client) -> None:
    [code] = recipe("python")
    defined: dict[str, Any] = {}
    exec(code.replace("http://localhost:8080", str(http.base_url)), defined)
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2, 3, 4], "block_size": 4}
    body = {"pod": "warm", "model": "recipe", "events": [event]}
    assert http.post("/v1/events", json=body).status_code == 200
    defined["indexer"].timeout = 30
    with defined["indexer"]:
        assert defined["best_pod"]("recipe", [1, 2, 3, 4, 5], ["cold", "warm"]) == "warm"
        assert defined["best_pod"]("recipe", [1, 2, 3, 4, 5], ["cold"]) == "cold"
        assert defined["best_pod"]("recipe", [9, 9, 9, 9, 9], ["cold", "warm"]) == "cold"
    unanswered = defined["indexer"] = httpx.Client(base_url="http://127.0.0.1:9")
    with unanswered:
        assert defined["best_pod"]("recipe", [1, 2, 3, 4, 5], ["cold", "warm"]) == "cold"


def test_curl_recipes(http: httpx.Client) -> None:
    """What curl would send: the JSON, and the bytes that printf makes of the octal escapes."""
    by_json, by_bytes = recipe("sh")
    body = re.search(r"-d '(.*)'", by_json)
    assert body is not None
    first = http.post("/v1/match", content=body[1], headers={"Content-Type": "application/json"}).json()
    escaped = re.search(r"printf '(.*)'", by_bytes)
    assert escaped is not None
    octets = bytes(int(octal, 8) for octal in re.findall(r"\\([0-7]+)", escaped[1]))
    second = http.post(
        "/v1/match",
        params={"model": "m"},
        content=octets,
        headers={"Content-Type": "application/octet-stream"},
    ).json()
    assert settled(first) == settled(second)
    assert first["tokens"] == 5


def test_go_recipe_shows_the_first_vector() -> None:
    [code] = recipe("go")
    assert f"// [{' '.join(VECTORS[0]['prefix_hashes'])}]" in code
    called = re.search(r'PrefixHashes\("m", "", "", 4, \[\]uint32\{(.*)\}\)\)', code)
    assert called is not None
    assert json.loads(f"[{called[1]}]") == VECTORS[0]["token_ids"]
