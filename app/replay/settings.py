"""What a replay can be told; here so that the command line knows the defaults without loading sockets."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class ReplaySettings:
    host: str = "127.0.0.1"  # where the publishers listen, as the indexer reaches them
    deadline_s: float = 10.0  # for the indexer to subscribe, and to apply what was published
    keep_pods: bool = False
