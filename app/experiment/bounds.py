"""What no policy on these pods can beat by much, or at all: hit rates of one cache for all requests.

`shared_lru` is one cache of all pods' pages together, least recently used out, leaf before root: what a
perfect policy would come near to without computing anything twice. `infinite` never forgets. Both are
filled the moment a prompt arrives, and neither knows of outputs, loads or time; so a policy that keeps
copies apart well can come close to `shared_lru`, but stays below.
"""

from __future__ import annotations

import collections

from app.experiment.trace import Trace

Block = tuple[int, int]  # number in the trace, and which engine block of it


def hit_rate(trace: Trace, *, block_size: int, capacity_blocks: int | None) -> float:
    """Part of the engine blocks of all prompts, partial last ones included, that are found; None is no bound."""
    parts = trace.block_tokens // block_size
    cache: collections.OrderedDict[Block, None] = collections.OrderedDict()
    hits = asked = 0
    for request in trace.requests:
        asked += -(-request.prompt_tokens // block_size)
        names = [(block, part) for block in request.block_ids for part in range(parts)]
        names = names[: request.prompt_tokens // block_size]
        findable = (request.prompt_tokens - 1) // block_size
        for name in names[:findable]:
            if name not in cache:
                break
            hits += 1
        for name in reversed(names):
            cache[name] = None
            cache.move_to_end(name)
        while capacity_blocks is not None and len(cache) > capacity_blocks:
            cache.popitem(last=False)
    return hits / asked if asked else 0.0
