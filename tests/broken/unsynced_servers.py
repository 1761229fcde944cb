"""Stores on servers that do not sync, and promise to survive a power loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from conformance import Harness
from conformance.harness import find
from cpkit.driver import Handle
from tests.broken.store import breaks, promising
from tests.servers.in_folder import (
    PostgresInFolder,
    RedisInFolder,
    ServerInFolder,
    on_a_free_port,
)
from tests.servers.postgres import shared_postgres
from tests.servers.redis import shared_redis

ACKNOWLEDGED = "powerloss.acknowledged-survives"


@dataclass(repr=False)
class Promising(ServerInFolder):
    """Opens handles on a server with the settings of a class."""

    kind: str

    own: ClassVar[dict[str, str]]

    def open(self, **options: Any) -> Handle[Any]:
        return promising(self.url, **self.own, **options)

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
class RedisSyncsEverySecond:
    settings: ClassVar = {"appendfsync": "everysec"}


@breaks(ACKNOWLEDGED, harness=on_redis)
class RedisNeverSyncs:
    settings: ClassVar = {"appendfsync": "no"}


@breaks(ACKNOWLEDGED, harness=on_postgres)
class PostgresNeverSyncs:
    settings: ClassVar = {"fsync": "off"}


@breaks(ACKNOWLEDGED, harness=on_postgres)
class PostgresSyncsAfterTheAnswer:
    settings: ClassVar = {"synchronous_commit": "off"}
