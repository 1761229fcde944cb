"""A store in one slot of a cluster: the same operations as on a single server."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from redis.exceptions import ResponseError

from cpkit.driver import Heard, StoreFailure, Timeouts
from cpkit_redis import listen
from cpkit_redis.nodes import Nodes
from cpkit_redis.store import RedisOptions, RedisStore

__all__ = ["ClusterOptions", "OneSlotStore"]


class ClusterOptions(RedisOptions):
    """A ``{tag}`` in the ``prefix`` keeps the store in one slot."""

    prefix: str = Field(
        default="cpkit", min_length=1, pattern=r"^[^{}]*(\{[^{}]+\}[^{}]*)?$"
    )


class OneSlotStore(RedisStore):
    """A store whose prefix has a tag, so that a cluster keeps it in one slot."""

    Options = ClusterOptions
    _in_cluster = True
    _publish = "SPUBLISH"
    _server: Nodes

    def _connect(self, where: Any, options: RedisOptions) -> str:
        # A read is tried at least three times before ``timeout``.
        patience = options.timeout / 4
        self._server = Nodes(
            where, options.pool_size, options.connect_timeout, patience
        )
        self._channel = self._base + b"changes"
        self._keys_to_create = [self._base + b"rehearsal", self._base + b"schema"]
        scheme = where.partition("://")[0].lower()
        return f"{scheme}://{self._server.name}"

    async def open(self) -> None:
        await super().open()
        timeout = self.timeouts.operation
        assert timeout is not None
        self.timeouts = Timeouts(timeout, timeout)

    def _arguments(self, keys: Any) -> list[Any]:
        # The version exists, and the others do not: see `cpkit_redis.nodes`.
        return [len(keys) + 1, *keys, self._base + b"schema", self._base]

    async def announce(self, thread_ids: Any) -> bool:
        try:
            return await super().announce(thread_ids)
        except ResponseError:  # Redis before 7
            self._may_publish = False
            return False

    async def listen(self, heard: Heard) -> None:
        pool = await self._server.pool(self._channel)

        try:
            await listen.listen(pool, self._channel, heard, sharded=True)
        except StoreFailure as failed:
            if "unknown command" in failed.reason:  # Redis before 7
                return

            self._server.forget()
            raise
