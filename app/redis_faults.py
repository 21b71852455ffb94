"""What a client of Redis raises where Redis, or the way to it, is at fault. A cluster's own is no RedisError."""

from __future__ import annotations

from redis.exceptions import RedisClusterException, RedisError

REDIS_FAULTS = (RedisError, RedisClusterException, OSError)
