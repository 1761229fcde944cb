"""Stores on servers that do not sync, and promise to survive a power loss."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from conformance import Harness
from conformance.harness import find
from cpkit import Checkpointer, Durability, Survives
from cpkit_postgres import PostgresCheckpointer
from cpkit_redis import RedisCheckpointer
from tests.broken.store import breaks
from tests.servers.in_folder import (
    PostgresInFolder,
    RedisInFolder,
    ServerInFolder,
    on_a_free_port,
)
from tests.servers.postgres import shared_postgres
from tests.servers.redis import shared_redis

ACKNOWLEDGED = "powerloss.acknowledged-survives"


class PromisesMachine:
    @property
    def durability(self) -> Durability:
        return Durability(Survives.MACHINE)


@dataclass(repr=False)
class Promising(ServerInFolder):
    """Opens handles of a class, on a server with the class's settings."""

    kind: str

    own: ClassVar[dict[str, str]]

    def open(self, **options: Any) -> AbstractAsyncContextManager[Checkpointer[Any]]:
        opened: Checkpointer[Any] = find(self.kind)(self.url, **self.own, **options)
        return opened  # type: ignore[return-value]  # every handle is one

    async def in_folder(self, folder: str) -> Harness:
        url, settings = on_a_free_port(self.url), find(self.kind).settings
        return type(self)(url, folder, settings, self.kind)


class PromisingPostgres(Promising, PostgresInFolder):
    own: ClassVar = {"schema": "broken"}


class PromisingRedis(Promising, RedisInFolder):
    own: ClassVar = {"prefix": "broken"}


# A handle of the shared server says what the store promises.


def on_postgres(kind: str, folder: str) -> Harness:
    return PromisingPostgres(shared_postgres(), folder, {}, kind)


def on_redis(kind: str, folder: str) -> Harness:
    return PromisingRedis(shared_redis(), folder, {}, kind)


@breaks(ACKNOWLEDGED, harness=on_redis)
class RedisSyncsEverySecond(PromisesMachine, RedisCheckpointer[Any]):
    settings: ClassVar = {"appendfsync": "everysec"}


@breaks(ACKNOWLEDGED, harness=on_redis)
class RedisNeverSyncs(PromisesMachine, RedisCheckpointer[Any]):
    settings: ClassVar = {"appendfsync": "no"}


@breaks(ACKNOWLEDGED, harness=on_postgres)
class PostgresNeverSyncs(PromisesMachine, PostgresCheckpointer[Any]):
    settings: ClassVar = {"fsync": "off"}


@breaks(ACKNOWLEDGED, harness=on_postgres)
class PostgresSyncsAfterTheAnswer(PromisesMachine, PostgresCheckpointer[Any]):
    settings: ClassVar = {"synchronous_commit": "off"}
