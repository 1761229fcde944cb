"""Agent state in Redis; see `cpkit_redis.driver` for the manual."""

from cpkit_redis.driver import RedisCheckpointer

__all__ = ["RedisCheckpointer"]
