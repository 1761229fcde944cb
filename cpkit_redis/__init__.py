"""Agent state in Redis; see `cpkit_redis.store` for the manual."""

from cpkit_redis.store import RedisCheckpointer, RedisStore

__all__ = ["RedisCheckpointer", "RedisStore"]
