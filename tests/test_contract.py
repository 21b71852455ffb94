"""Anything that the OpenAPI document allows, and much that it does not, sent to a running indexer.

Whatever comes, the answer is one that the document describes, in status, type and shape, and never a 5xx. The stream
without an end, `GET /v1/live`, has tests of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.transport.serialization import Binary

from app.config import load_settings
from app.main import create_app
from tests.serving.test_serving import serving

# Said by the server when a request has a head that it cannot read, such as one of more than 64 KiB: the application
# never sees it.
UNREADABLE_HEAD = b"Invalid HTTP request received."

# What the document cannot say: query parameters that go with one content type only, and "one of these two fields".
# The key comes with every request here, also with those that are made to lack it; `ignored_auth` asks without it.
UNSAYABLE = ("positive_data_acceptance", "unsupported_method", "missing_required_header")
KEY = "a-key-of-the-contract"

# The same, route by route: a name may have slashes in it, so that PUT /v1/pods/a/blocks is the pod `a/blocks`; one bad
# query of many does not fail the others; a list in a query has commas, and may be empty.
UNSAYABLE_OF = {
    "/v1/pods/{pod}/blocks": "allow_header_conformance",
    "/v1/match/batch": "negative_data_rejection",
    "/v1/match": "negative_data_rejection",
    "/v1/dump": "negative_data_rejection",
}


@schemathesis.serializer("application/msgpack")
def as_msgpack(_context: Any, value: Any) -> bytes:
    if isinstance(value, Binary):
        return bytes(value.data)
    return msgspec.msgpack.encode(_packable(value))


def _packable(value: Any) -> Any:
    """msgpack has no integers of more than 64 bits; as text they are as wrong."""
    if isinstance(value, dict):
        return {key: _packable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_packable(inner) for inner in value]
    return str(value) if isinstance(value, int) and not -(2**63) <= value < 2**64 else value


load_all_checks()
DOCUMENT = schemathesis.openapi.from_dict(create_app(load_settings()).openapi()).exclude(path="/v1/live")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(
        "serve", "--port", "0", KVINDEXER_TOKENIZER_HUB="false", KVINDEXER_API_KEYS=f"{KEY}:write"
    ) as (_, port):
        yield f"http://127.0.0.1:{port}"


@DOCUMENT.parametrize()
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_contract(case: Any, url: str) -> None:
    response = case.call(base_url=url, headers={"Authorization": f"Bearer {KEY}"})
    if response.content == UNREADABLE_HEAD:
        return
    unsayable = [*UNSAYABLE, *([UNSAYABLE_OF[case.path]] if case.path in UNSAYABLE_OF else [])]
    if response.status_code == 503 and "tokenizer-unavailable" in response.text:
        unsayable.append("not_a_server_error")  # no machine has the tokenizers of models that are made up
    case.validate_response(response, excluded_checks=CHECKS.get_by_names(unsayable))
