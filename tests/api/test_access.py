"""Keys, scopes and rates hold on every route, on the short way and on the framework's, however a request is spelt."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.api.access import OPEN, READ_METHODS
from tests.api.conftest import Indexer, stored
from tests.api_examples import PROMPT

READ, WRITE = "a-key-for-reading-0001", "a-key-for-writing-0001"
KEYS = f"{READ}:read,{WRITE}:write"
METHODS = {"get", "put", "post", "delete", "patch"}
BATCH = {"pod": "pod-x", "model": "m", "events": [stored([5], [1, 2, 3, 4])]}
# What a key of scope read may do besides GET: nothing that changes what is held.
READING = {
    ("post", "/v1/match"),
    ("post", "/v1/match/batch"),
    ("post", "/v1/fuzzy-match"),
    ("post", "/v1/route"),
    ("post", "/v1/hashes"),
    ("post", "/query"),
    ("post", "/query_by_hash"),
    ("post", "/lookup"),
}


def bearing(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def guarded(make_indexer: Callable[..., Indexer]) -> Indexer:
    made = make_indexer(api_keys=KEYS)
    response = made.post("/v1/events", {**BATCH, "pod": "pod-a"}, headers=bearing(WRITE))
    assert response.status_code == 200
    return made


def operations(indexer: Indexer) -> Iterator[tuple[str, str, Any]]:
    """Method, path and an example of the body of everything in the document but the endless feed."""
    document = indexer.app.openapi()
    for path, item in document["paths"].items():
        for method in METHODS & item.keys():
            content = item[method].get("requestBody", {}).get("content", {}).get("application/json")
            body = None
            if content is not None:
                body = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]][
                    "examples"
                ][0]
            yield method, path, body


def picture(indexer: Indexer) -> Any:
    stats = indexer.service.stats()
    return stats["index"], stats["contexts"], stats["sources"], sorted(indexer.service.pods)


def test_every_route_needs_a_key_of_its_scope(guarded: Indexer) -> None:
    asked = 0
    for method, path, body in operations(guarded):
        if path in OPEN or path == "/v1/live":
            continue
        is_read = method == "get" or (method, path) in READING
        before = picture(guarded)
        for headers, status in [
            ({}, 401),
            (bearing("unknown"), 401),
            (bearing(READ), None if is_read else 403),
        ]:
            response = guarded.request(
                method.upper(), path.replace("{pod}", "pod-a"), json=body, headers=headers
            )
            assert response.status_code == (status or response.status_code), (method, path, headers)
            if status is None:
                assert response.status_code not in (401, 403), (method, path)
            else:
                assert response.json()["status"] == status
                assert response.headers["content-type"] == "application/problem+json"
                assert response.headers["www-authenticate"].startswith('Bearer realm="kvindexer"')
            assert picture(guarded) == before or is_read, (method, path)
        asked += 1
    assert asked >= 23
    for method, path, body in operations(guarded):
        if path != "/v1/live":
            response = guarded.request(
                method.upper(), path.replace("{pod}", "pod-a"), json=body, headers=bearing(WRITE)
            )
            assert response.status_code not in (401, 403), (method, path, response.text)


def test_reading_changes_nothing_that_is_held(guarded: Indexer) -> None:
    before = guarded.service.stats()
    for method, path, body in operations(guarded):
        if path != "/v1/live":
            guarded.request(method.upper(), path.replace("{pod}", "pod-a"), json=body, headers=bearing(READ))
    after = guarded.service.stats()
    assert (after["digest"], after["index"], after["sources"]) == (
        before["digest"],
        before["index"],
        before["sources"],
    )
    assert set(guarded.service.pods) == {"pod-a"}


def test_probes_need_no_key(guarded: Indexer) -> None:
    assert guarded.get("/healthz").status_code == 200
    assert guarded.get("/readyz").status_code == 200


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/metrics", "/redoc", "/nothing", "/v1/live"])
def test_what_people_and_tools_ask_needs_a_key_too(guarded: Indexer, path: str) -> None:
    assert guarded.get(path).status_code == 401
    if path != "/v1/live":
        assert guarded.get(path, headers=bearing(READ)).status_code in (200, 404)


def test_page_is_shown_with_the_refusal(guarded: Indexer) -> None:
    """A browser gets the page, which asks for a key, and the files that the page is made of."""
    browser = {"Accept": "text/html,application/xhtml+xml"}
    page = guarded.get("/", headers=browser)
    assert (page.status_code, "www-authenticate" in page.headers) == (401, True)
    assert 'id="api-key"' in page.text
    assert "content-security-policy" in page.headers
    for file in re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page.text):
        assert guarded.get("/" + file).status_code == 200
    assert guarded.get("/").headers["content-type"] == "application/problem+json"
    assert guarded.get("/", headers={**browser, **bearing(READ)}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": WRITE},
        {"Authorization": f"Basic {WRITE}"},
        {"Authorization": f"Bearer{WRITE}"},
        {"Authorization": f"Bearer {WRITE[:-1]}"},
        {"Authorization": f"Bearer {WRITE}x"},
        {"Authorization": f"Bearer {WRITE.upper()}"},
        {"Authorization": f"Bearer {KEYS}"},
        {"Authorization": f"Bearer {WRITE}:write"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer"},
        {"Authorization": ""},
        {"Authorization": "Bearer " + "x" * 5_000},
        {"Authorization": b"Bearer \xff\xfe\x80"},
        [("Authorization", f"Bearer {WRITE}"), ("Authorization", f"Bearer {WRITE}")],
        [("Authorization", f"Bearer {READ}"), ("Authorization", f"Bearer {WRITE}")],
        {"Proxy-Authorization": f"Bearer {WRITE}"},
        {"X-Api-Key": WRITE},
        {"Cookie": f"Authorization=Bearer {WRITE}"},
    ],
)
def test_no_other_spelling_of_a_key_counts(guarded: Indexer, headers: Any) -> None:
    before = picture(guarded)
    assert guarded.post("/v1/events", BATCH, headers=headers).status_code == 401
    assert guarded.get("/v1/pods", headers=headers).status_code == 401
    assert guarded.get(f"/v1/pods?api_key={WRITE}&access_token={WRITE}").status_code == 401
    assert picture(guarded) == before


@pytest.mark.parametrize("said", [f"Bearer {WRITE}", f"bearer {WRITE}", f"BEARER  {WRITE} "])
def test_scheme_is_in_any_case(guarded: Indexer, said: str) -> None:
    assert guarded.post("/v1/events", BATCH, headers={"Authorization": said}).status_code == 200


pieces = st.sampled_from(
    [
        *(
            "healthz",
            "readyz",
            "dashboard",
            "v1",
            "events",
            "match",
            "pods",
            "pod-a",
            "blocks",
            "register",
            "query",
        ),
        *(
            "..",
            ".",
            "",
            "%2e%2e",
            "%2f",
            "V1",
            "Events",
            "events;x",
            "main.js",
            "openapi.json",
            "unregister",
            "\\",
        ),
    ]
)
paths = st.lists(pieces, max_size=5).map(lambda parts: "/" + "/".join(parts))
known_paths = st.sampled_from(
    ["/v1/events", "/v1/pods/pod-a", "/v1/pods/pod-a/blocks", "/register", "/v1/prefixes"]
)
methods = st.sampled_from(
    ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "post", "delete", "X"]
)
overrides = st.sampled_from(
    [{}, {"X-HTTP-Method-Override": "GET"}, {"X-Original-URL": "/healthz"}, {"Host": "x"}]
)
contents = st.sampled_from(
    [BATCH, {"model": "m"}, {"model": "m", "token_ids": PROMPT}, {"instance_id": "pod-a"}]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(known_paths, paths), methods, overrides, contents, st.sampled_from([{}, bearing(READ)]))
def test_no_spelling_of_a_request_goes_around_it(
    guarded: Indexer, path: str, method: str, more: dict[str, str], content: Any, key: dict[str, str]
) -> None:
    before = picture(guarded)
    headers = {"Content-Type": "application/json", **more, **key}
    status, said, _ = guarded.raw(method, path, headers, json.dumps(content).encode())
    assert picture(guarded) == before, "a request without the right changed something"
    assert "www-authenticate" in said or status not in (401, 403)
    decoded = unquote(path)
    is_file = method in READ_METHODS and decoded.startswith("/dashboard/")
    if not key:
        assert status == 401 or decoded in OPEN or is_file
    if not key and status == 200:
        kinds = ("text/javascript", "text/css", "text/html")
        assert decoded in OPEN or said["content-type"].partition(";")[0] in kinds


def test_refused_without_reading_the_body(guarded: Indexer) -> None:
    """Nobody without a key can make the process hold what they send."""
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"2")]
    scope = {"type": "http", "method": "POST", "path": "/v1/events", "query_string": b"", "headers": headers}
    asyncio.run(_called(guarded, scope, receive, send))
    assert sent[0]["status"] == 401


def test_websockets_are_refused(guarded: Indexer) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/v1/live", "query_string": b"", "headers": []}
    asyncio.run(_called(guarded, scope, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def _called(indexer: Indexer, scope: Any, receive: Any, send: Any) -> None:
    await indexer.app(scope, receive, send)


def test_reserving_needs_write(guarded: Indexer) -> None:
    """It announces blocks, as /v1/prefixes does; a key for reading gets its route all the same."""
    query = {"model": "m", "token_ids": PROMPT, "reserve": True}
    answer = guarded.post("/v1/route", query, headers=bearing(READ)).json()
    assert (answer["pod"], answer["reserved_blocks"]) == ("pod-a", 0)
    assert guarded.service.stats()["index"]["speculative_blocks"] == 0
    answer = guarded.post("/v1/route", query, headers=bearing(WRITE)).json()
    assert answer["reserved_blocks"] == 2
    assert guarded.service.stats()["index"]["speculative_blocks"] == 2


def test_without_keys_nothing_is_asked(indexer: Indexer) -> None:
    assert indexer.post("/v1/events", BATCH).status_code == 200
    assert indexer.get("/v1/pods", headers=bearing("whatever")).status_code == 200
    assert indexer.get("/", headers={"Accept": "text/html"}).status_code == 200


def test_refusals_are_counted(guarded: Indexer) -> None:
    guarded.get("/v1/pods")
    guarded.get("/v1/pods", headers=bearing("unknown"))
    guarded.post("/v1/events", BATCH, headers=bearing(READ))
    text = guarded.get("/metrics", headers=bearing(READ)).text
    for name, value in [
        ("refused_without_key_total", 1),
        ("refused_unknown_key_total", 1),
        ("refused_scope_total", 1),
        ("refused_rate_total", 0),
        ("keys", 2),
    ]:
        assert f"kvindexer_access_{name} {value}.0\n" in text
    assert 'method="POST",route="unmatched",status="403"} 1.0' in text


# -- rates


def test_each_key_has_a_rate_of_its_own(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(api_keys=KEYS, rate_requests_per_s=0.5, rate_burst_requests=3)

    def ask(key: str) -> httpx.Response:
        return indexer.post("/v1/match", {"model": "m", "token_ids": PROMPT}, headers=bearing(key))

    assert [ask(READ).status_code for _ in range(4)] == [200, 200, 200, 429]
    assert ask(WRITE).status_code == 200
    refused = ask(READ)
    assert refused.headers["retry-after"] == "2"
    assert refused.json()["bound"] == "rate_requests_per_s"
    indexer.clock.now_s += 1.5
    assert (ask(READ).status_code, ask(READ).headers["retry-after"]) == (429, "1")
    indexer.clock.now_s += 0.5
    assert [ask(READ).status_code for _ in range(2)] == [200, 429]
    indexer.clock.now_s += 1_000
    assert [ask(READ).status_code for _ in range(4)] == [200, 200, 200, 429], (
        "no more than a burst is saved up"
    )
    assert indexer.get("/healthz").status_code == 200
    assert "kvindexer_access_refused_rate_total 6.0" in indexer.get("/metrics", headers=bearing(WRITE)).text


def test_without_keys_all_share_one_rate(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(rate_requests_per_s=1, rate_burst_requests=2)
    assert [indexer.get("/v1/pods", headers=bearing(str(i))).status_code for i in range(3)] == [200, 200, 429]
    assert indexer.get("/readyz").status_code == 200


def test_refused_requests_take_nothing_from_a_key(make_indexer: Callable[..., Indexer]) -> None:
    indexer = make_indexer(api_keys=KEYS, rate_requests_per_s=1, rate_burst_requests=1)
    for _ in range(5):
        assert indexer.get("/v1/pods").status_code == 401
        assert indexer.post("/v1/events", BATCH, headers=bearing(READ)).status_code == 403
    assert indexer.get("/v1/pods", headers=bearing(READ)).status_code == 200
