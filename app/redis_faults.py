"""What a client of Redis raises where Redis, or the way to it, is at fault. A cluster's own is no RedisError.

Nor is what a cluster's client raises where one command closes the connection that another one is being sent on, as it
does when a node goes: uvloop's word about a closed transport (RuntimeError), or that a writer is None (AttributeError).
"""

from __future__ import annotations

from redis.exceptions import RedisClusterException, RedisError

REDIS_FAULTS = (RedisError, RedisClusterException, OSError, RuntimeError, AttributeError)
