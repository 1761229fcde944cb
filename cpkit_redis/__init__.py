"""Agent state in Redis; ``docs/drivers.md`` is the manual."""

from cpkit.registry import needs_extra

with needs_extra("cpkit_redis", "redis"):
    from cpkit_redis.cluster import ClusterStore
    from cpkit_redis.store import RedisCheckpointer, RedisStore

__all__ = ["ClusterStore", "RedisCheckpointer", "RedisStore"]
