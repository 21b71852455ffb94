"""What docs/api.md asks of a running indexer, in the order in which it is asked.

A route without an entry here is asked with the example of its body's schema. Deletions come last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """`path` is what is asked; `route` what the document calls it. `status` 0 is any that is no error."""

    method: str
    route: str
    path: str
    body: Mapping[str, Any] | None = None
    status: int = 200
    say: str = ""


PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19]
STORED = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": PROMPT[:8],
    "block_size": 4,
    "medium": "GPU",
}

EXAMPLES = (
    Example(
        "POST",
        "/v1/events",
        "/v1/events",
        {"pod": "pod-a", "model": "m", "seq": 0, "owner": "agent1:system", "events": [STORED]},
        say="A pod that nobody has registered says what it stored, and for whom.",
    ),
    Example("PUT", "/v1/pods/{pod}", "/v1/pods/pod-b", {"model": "m", "block_size": 4}),
    Example(
        "POST",
        "/v1/events",
        "/v1/events",
        {
            "pod": "pod-b",
            "model": "m",
            "seq": 0,
            "events": [
                {
                    "type": "PrefixesStored",
                    "block_hashes": [77],
                    "prefix_hashes": [5316489978545002284],
                    "block_size": 4,
                    "medium": "CPU",
                },
                {"type": "BlockRemoved", "block_hashes": ["00ff00ff00ff00ff"]},
                {"type": "BlockStored", "block_hashes": [3], "token_ids": [1, 2], "block_size": 4},
            ],
        },
        say="Another tells a prefix by its hash, removes a block that it never had, and makes a mistake.",
    ),
    Example("POST", "/v1/match", "/v1/match", {"model": "m", "token_ids": PROMPT, "include_hashes": True}),
    Example(
        "POST",
        "/v1/fuzzy-match",
        "/v1/fuzzy-match",
        {"model": "m", "token_ids": [91, *PROMPT[:4], 92, 93, 94, *PROMPT[4:8]], "mode": "sliding"},
        say="What was stored as the first two blocks of a prompt, elsewhere in another.",
    ),
    Example(
        "POST", "/v1/hashes", "/v1/hashes", {"model": "m", "token_ids": PROMPT, "cache_salt": "tenant-7"}
    ),
    Example(
        "POST",
        "/v1/prefixes",
        "/v1/prefixes",
        {"model": "m", "pod": "pod-b", "token_ids": PROMPT, "ttl_s": 2.0},
    ),
    Example("GET", "/v1/pods", "/v1/pods"),
    Example("GET", "/v1/pods/{pod}", "/v1/pods/pod-a"),
    Example("GET", "/v1/pods/{pod}", "/v1/pods/nobody", status=404, say="Errors are problem objects."),
    Example("GET", "/v1/owners", "/v1/owners"),
    Example("GET", "/v1/stats", "/v1/stats"),
    Example("GET", "/v1/dump", "/v1/dump?pods=pod-a"),
    Example("GET", "/healthz", "/healthz"),
    Example("GET", "/readyz", "/readyz"),
    Example("GET", "/metrics", "/metrics"),
    Example("DELETE", "/v1/owners/{owner}", "/v1/owners/agent1"),
    Example("DELETE", "/v1/pods/{pod}/blocks", "/v1/pods/pod-a/blocks?tier=gpu"),
    Example("DELETE", "/v1/pods/{pod}", "/v1/pods/pod-a", status=204),
)
