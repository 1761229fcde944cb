"""Agent state in Redis, for any number of processes on any number of machines.

``docs/drivers.md`` is the manual.

URL forms
    ``redis://user:password@host:6379/0``, ``rediss://`` (TLS, with redis-py's ``ssl_*``
    parameters) and ``redis+unix:///path/to/socket?db=0``. In place of a URL: a client
    of redis.asyncio, a Sentinel's ``master_for`` too. The handle makes its own
    connections from the client's settings, and does not close the client.

Durability
    As the server is configured; read when the handle opens.

What is atomic
    Each write. The writes of a batch, of any kind, are one call of ``operations.lua``:
    one round trip, one transaction in the append-only file. A load is one round trip.
    It is repeated if the thread changed meanwhile, and for a range of a trimmed thread.

Permissions
    Redis 6.2 or newer::

        ACL SETUSER agent on >password ~{cpkit}:* -@all +select +eval +evalsha
            +set +get +exists +unlink +time +rpush +llen +lrange +ltrim +hset +hget
            +hmget +hdel +hlen +hgetall +hvals +zadd +zrem +zrevrange +zrangebyscore
            +zrangebylex
            +pubsub|numsub +publish +subscribe resetchannels &{cpkit}:*
            +config|get +info

    The last line is only for the durability. The one before it lets changes wake a
    watch, which polls without it.

Caveats
    The server does nothing else while it runs a script: an append of 64 MiB takes it
    about a third of a second, and a restore of a large thread longer.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain, islice
from operator import itemgetter
from typing import Any, ClassVar, TypeVar

from pydantic import Field, PositiveInt
from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from cpkit.driver import (
    Decode,
    DriverOptions,
    FullHandle,
    Heard,
    Limits,
    Outcome,
    ServerOptions,
    Snapshot,
    StoredCall,
    StoredDump,
    StoreFailure,
    StoreInfo,
    Write,
    decode_rows,
    prefix_end,
    span,
)
from cpkit.driver.together import Together
from cpkit.errors import CorruptThread, SchemaMismatch
from cpkit.records import Durability, Survives, ThreadInfo
from cpkit_redis.address import URL_OPTIONS, name_of, pool_of
from cpkit_redis.durability import SETTINGS, durability_of
from cpkit_redis.errors import UNWRITABLE, code_of, failure, refusal
from cpkit_redis.operations import SCRIPT, SHA, operation, outcome
from cpkit_redis.schema import (
    SCHEMA_VERSION,
    base_of,
    decode_call,
    decode_calls,
    decode_thread,
    new_schema,
    version_of,
)
from cpkit_redis.server import Server
from cpkit_redis.space import dead_space

__all__ = ["RedisCheckpointer", "RedisStore"]

MessageT = TypeVar("MessageT")

# Threads in one call of the script: the server does nothing else meanwhile.
_PAGE = 1000

# Settings that limit one argument and one command, and their defaults.
_LIMITS = {"proto-max-bulk-len": 512 * 1024**2, "client-query-buffer-limit": 1024**3}

# What a read is answered with, unless it is an error.
_ANSWERS = (list, int, bytes, type(None))


class RedisOptions(ServerOptions):
    """``prefix`` starts every key; ``pool_size`` limits the connections."""

    prefix: str = Field(default="cpkit", min_length=1, pattern=r"^[^{}]+$")
    pool_size: PositiveInt = 8


class RedisStore:
    """A store in a Redis database; ``where`` is a URL or a client of redis.asyncio."""

    Options: ClassVar[type[DriverOptions]] = RedisOptions
    client_options: ClassVar[frozenset[str]] = URL_OPTIONS
    max_writes = 256
    locks_threads = False
    erases = trims = erases_calls = True
    survives_by_default = Survives.PROCESS
    _in_cluster = False

    def __init__(self, where: str | Redis, options: RedisOptions) -> None:
        # Kept alive here: a Sentinel's connections have only a weak reference to it.
        self._where = where
        self._base = base_of(options.prefix)
        # What the key ``schema`` must hold; read when the store opens.
        self._schema = b""
        self._read_schema = (b"GET", self._base + b"schema")
        self._server, address = self._connect(where, options)
        self.name = f"{address}{'&' if '?' in address else '?'}prefix={options.prefix}"
        self.timeout = options.timeout
        self.limits = Limits()
        self._together = Together[tuple[Sequence[bytes], ...], list[Any]]()
        self._notifies = options.notify
        self._durability = Durability(
            Survives.NONE, {}, ("not known before the store is open",)
        )

    def _connect(self, where: Any, options: RedisOptions) -> tuple[Server, str]:
        """Return what sends commands, and the address for people to read."""
        pool = pool_of(where, options.pool_size, options.connect_timeout)
        return Server(pool, options.pool_size), name_of(pool)

    @classmethod
    def from_url(cls, url: str, options: RedisOptions) -> RedisStore:
        return cls(url, options)

    @classmethod
    async def inspect(cls, url: str, options: RedisOptions) -> StoreInfo | None:
        """Read the version and INFO; ``None`` where the server does not answer."""
        store = cls.from_url(url, options)

        try:
            async with asyncio.timeout(options.connect_timeout):
                found, info = await store._server.ask(store._read_schema, (b"INFO",))
        except (StoreFailure, TimeoutError):
            return None
        finally:
            await store.close()

        if isinstance(found, Exception):
            return None

        dead = dead_space(_info(info))
        return StoreInfo(found is not None, found and version_of(found), dead=dead)

    async def open(self) -> None:
        # Nothing is written before it is certain that the server can be used.
        names = (*SETTINGS, *_LIMITS)
        settings = ((b"CONFIG", b"GET", name.encode()) for name in names)
        found, answer, *answers = await self._server.ask(
            self._read_schema, (b"INFO",), *settings
        )
        info = _info(answer)
        config: dict[str, str] = {}

        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, list) and answer:
                config[name] = answer[1].decode()

        if info.get("redis_mode") == "cluster" and not self._in_cluster:
            reason = "the server is part of a cluster: write redis+cluster://host:port"
            raise StoreFailure("rejected", reason)

        # Its reads lag, without end if its link is down. If it takes writes, they are
        # lost when it next copies its primary.
        if info.get("role") == "slave":
            primary = f"{info.get('master_host')}:{info.get('master_port')}"
            raise StoreFailure(
                "rejected",
                f"the server is a replica of {primary} (its link is "
                f"{info.get('master_link_status')}): write the URL of the primary",
            )

        if isinstance(found, Exception):
            raise failure(found) from found

        self._schema = b""

        try:
            [found] = await self._run([b"create", new_schema()])
        except StoreFailure as refused:
            # An existing store can be opened and read while the server refuses writes.
            if found is None or code_of(refused.reason) not in UNWRITABLE:
                raise

        if version_of(found) != SCHEMA_VERSION:
            raise SchemaMismatch(self.name, version_of(found), SCHEMA_VERSION)

        self._schema = found
        self._durability = durability_of(config, info, self._in_cluster)
        # Half of the server's limit: a message may be a byte, and has a separator.
        limit = min(int(config.get(name, _LIMITS[name])) for name in _LIMITS)
        self.limits = Limits(limit // 2, limit // 2)

    async def close(self) -> None:
        await self._server.close()

    def durability(self) -> Durability:
        return self._durability

    # Writes

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        operations: list[bytes] = []

        for write in batch:
            operations += operation(write)

        if self._notifies:
            operations.append(b"announce")

        answers = await self._run(operations, batch)
        del answers[len(batch) :]
        return [one if type(one) is int else outcome(one) for one in answers]

    # Reads

    async def snapshot(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> Snapshot | None:
        first, asked = 0, (b"", b"")

        # Again until the bounds fit the thread's first position: where it was trimmed,
        # positions are not those of its list.
        while asked != (asked := _bounds(start, stop, first)):
            times, length, messages, extra, pending = await self._read(
                thread_id,
                (b"LLEN", b"m"),
                (b"LRANGE", b"m", *asked),
                (b"HGETALL", b"x"),
                (b"HGETALL", b"p"),
                together=start == stop == 0,
            )

            if not times:
                _check_absent(thread_id, length, extra, pending)
                return None

            first = int(times.get(b"first", 0))

        version = first + length
        position, _ = span(start, stop, version, first)
        return Snapshot(
            await decode_rows(decode, messages, position),
            list(extra.items()),
            decode_calls(thread_id, pending) if pending else [],
            version,
            position,
        )

    async def holder(self, key: str) -> StoredCall | None:
        [answer] = await self._run([b"find", key.encode()])
        return None if answer is None else decode_call(*answer[1:])[1]

    # Optional abilities

    async def threads(
        self, prefix: str, after: str | None, limit: int, erased: bool
    ) -> list[ThreadInfo]:
        rows = await self._list(prefix, after, limit, erased)
        return [decode_thread(*row[:4]) for row in rows]

    async def calls(self, thread_id: str) -> list[StoredCall]:
        _, *found = await self._read(thread_id, (b"HGETALL", b"p"), (b"HGETALL", b"c"))
        return decode_calls(thread_id, *found)

    async def dump(self, thread_id: str) -> StoredDump | None:
        times, messages, extra, *hashes = await self._read(
            thread_id,
            (b"LRANGE", b"m", b"0", b"-1"),
            *((b"HGETALL", kind) for kind in (b"x", b"p", b"c")),
        )
        calls = decode_calls(thread_id, *hashes)

        if not times:
            _check_absent(thread_id, messages, extra, hashes[0])
            return StoredDump([], [], calls, None, None) if calls else None

        try:
            created, updated = int(times[b"created"]), int(times[b"updated"])
            first = int(times.get(b"first", 0))
        except (KeyError, ValueError) as exc:
            raise CorruptThread(thread_id, "its times", repr(exc)) from exc

        return StoredDump(messages, [*extra.items()], calls, created, updated, first)

    async def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        rows: list[Any] = []

        if thread_ids is None:
            rows = await self._list("", None, sys.maxsize, False)
        else:
            for start in range(0, len(thread_ids), _PAGE):
                ids = [one.encode() for one in thread_ids[start : start + _PAGE]]
                rows += await self._run([part for one in ids for part in (b"row", one)])

        # Each change makes ``updated`` later, except a restore, which has its own time.
        return {name.decode(): tuple(row) for name, *row in rows if any(row)}

    async def listen(self, heard: Heard) -> None:
        await self._server.listen(self._base + b"changes", heard)

    # The way to the server

    async def _run(
        self, operations: Sequence[bytes], batch: Sequence[Write] = ()
    ) -> list[Any]:
        """Run operations, those of a batch or others, and return their outcomes."""
        rest = (b"1", self._base, self._schema, *operations)
        [answer] = await self._server.ask((b"EVALSHA", SHA, *rest))

        if type(answer) is NoScriptError:
            [answer] = await self._server.ask((b"EVAL", SCRIPT, *rest))

        if type(answer) is not list:
            raise failure(answer) from answer

        if answer[0] != b"failed":
            return answer

        _, text, number, has_written = answer
        reason = text.decode(errors="replace")

        if code_of(reason) == "READONLY":
            await self._server.reconnect()

        if has_written:  # Redis does not roll it back
            raise StoreFailure("unknown", reason)

        raise refusal(reason, batch[number].thread_id if batch else "")

    async def _read(
        self, thread_id: str, *queries: tuple[bytes, ...], together: bool = False
    ) -> list[Any]:
        """Return a thread's times, and the answers to queries, of one moment.

        A query is a command, a kind of key, and the rest. Every change of messages,
        extra or pending calls sets a later time: where the times are the same before
        and after, nothing of these changed.
        """
        name = b":" + thread_id.encode()
        times = (b"HGETALL", b"t")
        commands = [
            (command, self._base + kind + name, *rest)
            for command, kind, *rest in (times, *queries, times)
        ]
        ask = self._ask_together if together else self._server.ask

        while True:
            *answers, again, schema = await ask(*commands, self._read_schema)

            for answer in (*answers, again, schema):
                if type(answer) not in _ANSWERS:
                    raise refusal(answer, thread_id) from answer

            if schema != self._schema:
                key = self._read_schema[1].decode(errors="replace")
                raise failure(f"VANISHED {key} is not what it was")

            if answers[0] == again:
                return [
                    dict(zip(answer[::2], answer[1::2], strict=True))
                    if command[0] == b"HGETALL"
                    else answer
                    for command, answer in zip(commands, answers, strict=False)
                ]

    async def _ask_together(self, *commands: Sequence[bytes]) -> list[Any]:
        """Send commands in one go with those of other callers."""
        return await self._together.read(commands, self._ask_all)

    async def _ask_all(
        self, asked: list[tuple[Sequence[bytes], ...]]
    ) -> list[list[Any]]:
        answers = iter(await self._server.ask(*chain.from_iterable(asked)))
        return [[*islice(answers, len(commands))] for commands in asked]

    async def _list(
        self, prefix: str, after: str | None, limit: int, erased: bool
    ) -> list[Any]:
        """Return rows of the list, in the order of ids, as the script has them."""
        end = prefix_end(prefix)
        high = b"+" if end is None else b"(" + end.encode()
        low = b"[" + prefix.encode() if prefix else b"-"
        rows: list[Any] = []

        if after is not None and after >= prefix:
            low = b"(" + after.encode()

        while len(rows) < limit:
            size = min(limit - len(rows), _PAGE)
            bounds = (low, high, b"%d" % size, b"%d" % erased)
            [page] = await self._run([b"list", *bounds])
            # By bytes of UTF-8, which is the order of code points.
            page = sorted(page, key=itemgetter(0))[:size]
            rows += page

            if len(page) < size:
                break

            low = b"(" + page[-1][0]

        return rows


class RedisCheckpointer(FullHandle[MessageT]):
    """A handle of a store in a Redis database.

    ``where`` is a URL or a client of redis.asyncio that does not decode responses.
    Options as in the URL.
    """

    def __init__(
        self,
        where: str | Redis,
        *,
        message_type: type[MessageT] | Any = dict,
        **options: Any,
    ) -> None:
        known = RedisOptions(**options)
        store = RedisStore(where, known)
        super().__init__(store, message_type=message_type, options=known)


def _info(answer: Any) -> dict[str, str]:
    """Return what INFO says; nothing where the server denies it."""
    if isinstance(answer, Exception):
        return {}

    lines = answer.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _check_absent(thread_id: str, *found: object) -> None:
    """Raise ``CorruptThread`` where a thread without times has anything else."""
    if any(found):
        raise CorruptThread(thread_id, "its times", "the key is missing")


def _bounds(start: int, stop: int | None, first: int) -> tuple[bytes, bytes]:
    """Return a slice of positions for LRANGE, which includes the last one.

    The list begins at position ``first``. Redis counts from the end as Python does.
    """

    def place(position: int) -> int:
        shifted = position if position < 0 else max(0, position - first)
        return max(-(2**53), min(shifted, 2**53))  # Redis reads 64 bits

    if stop is not None and place(stop) == 0:
        return b"1", b"0"

    return b"%d" % place(start), b"%d" % (-1 if stop is None else place(stop) - 1)
