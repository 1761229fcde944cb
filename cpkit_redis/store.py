"""Agent state in Redis, for any number of processes on any number of machines.

URL forms
    ``redis://user:password@host:6379/0``, ``rediss://`` (TLS, with redis-py's ``ssl_*``
    parameters in the query: ``ssl_ca_certs=/path/ca.pem``) and
    ``redis+unix:///path/to/socket?db=0``. Options: ``prefix`` (``cpkit``) of all keys,
    ``pool_size`` (8) connections at most, ``timeout`` (30) seconds for an operation,
    ``connect_timeout`` (10) seconds for which it retries while the server cannot be
    reached, and those of every driver. In place of the URL `RedisCheckpointer` takes a
    client of redis.asyncio, a Sentinel's ``master_for`` too: the handle makes its own
    connections from the client's settings, and does not close the client.

Durability
    As the server is configured; read when the handle opens. ``appendfsync always``
    survives a power loss. ``everysec`` survives a kill of the server; a power loss can
    lose about the last second. Without an append-only file a restart loses everything
    since the last snapshot. A server that evicts keys when its memory is full can lose
    any write. A failover to a replica can lose acknowledged writes, because the server
    answers before its replicas have them.

What is atomic
    Each write. The writes of a batch are one call of ``operations.lua``: one round
    trip, one transaction in the append-only file. A restored thread is first copied to
    keys of its own, in parts, and one operation renames them; the copy of a process
    that died expires. A load is one transaction of plain reads. The client library
    repeats nothing: a write whose answer was lost raises ``BackendUnavailable`` with
    ``maybe_applied``, a read is repeated.

Permissions
    Redis 6.2 or newer. The last line is only for the durability, and the one before it
    lets changes wake a watch, which polls without it::

        ACL SETUSER agent on >password ~cpkit:* -@all +select +multi +exec +eval
            +evalsha +set +get +exists +unlink +rename +expire +persist +time +rpush
            +llen +lrange +hset +hget +hmget +hdel +hexists +hlen +hgetall +zadd +zrem
            +zscore +zcount +zrevrange +zrangebylex
            +publish +subscribe +unsubscribe +ping &cpkit:*
            +config|get +info

Caveats
    A node of a Redis Cluster is refused, and nothing is written: `cpkit_redis.cluster`
    has the URL for it. No key expires except those of an unfinished restore, and no
    command searches keys by pattern. Two stores in one database are two prefixes. The
    server does nothing else while it runs a script: an append of 64 MiB takes it about
    a third of a second.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

from pydantic import Field, PositiveInt
from redis.asyncio import Redis
from redis.exceptions import (
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ResponseError,
)

from cpkit.driver import (
    Append,
    Batching,
    Claim,
    Decode,
    DriverOptions,
    Erase,
    FullHandle,
    Heard,
    Limits,
    Merge,
    Outcome,
    Resolve,
    Restore,
    ServerOptions,
    Snapshot,
    StoredCall,
    StoredDump,
    StoreFailure,
    StoreInfo,
    Timeouts,
    Write,
    decode_rows,
    prefix_end,
    span,
)
from cpkit.errors import CorruptThread, SchemaMismatch
from cpkit.records import Durability, Survives, ThreadInfo
from cpkit_redis import listen
from cpkit_redis.address import URL_OPTIONS, name_of, pool_of
from cpkit_redis.durability import SETTINGS, durability_of
from cpkit_redis.errors import NO_CLUSTER, UNWRITABLE, code_of, failure, refusal
from cpkit_redis.nodes import Nodes
from cpkit_redis.operations import (
    SCRIPT,
    SHA,
    grouped,
    operation,
    outcome,
    outcomes_of,
)
from cpkit_redis.restoring import copy_thread
from cpkit_redis.schema import (
    KINDS,
    SCHEMA_VERSION,
    decode_calls,
    decode_thread,
    slot_of,
)
from cpkit_redis.server import Server

__all__ = ["RedisCheckpointer", "RedisStore"]

MessageT = TypeVar("MessageT")

# Threads in one reply; small, because the server does nothing else meanwhile.
_PAGE = 1000

_LIMITS = {"proto-max-bulk-len": 512 * 1024**2, "client-query-buffer-limit": 1024**3}
"""Settings that limit one argument and one command, and their defaults."""


class RedisOptions(ServerOptions):
    """``prefix`` starts every key; ``pool_size`` limits the connections."""

    prefix: str = Field(default="cpkit", min_length=1, pattern=r"^[^{}]+$")
    pool_size: PositiveInt = 8


class RedisStore:
    """A store in a Redis database; ``where`` is a URL or a client of redis.asyncio."""

    Options: ClassVar[type[DriverOptions]] = RedisOptions
    client_options: ClassVar[frozenset[str]] = URL_OPTIONS
    # Two lanes: while the server has one half of a crowd, the other half gets ready. 64
    # tasks are a fifth faster. A restore takes several round trips, for which other
    # writes should not wait.
    batching = Batching(lanes=2, kinds=(Append, Merge, Claim, Resolve, Erase))
    erases = True
    _in_cluster = False
    _publish = "PUBLISH"

    def __init__(self, where: str | Redis, options: RedisOptions) -> None:
        # Kept alive here: a Sentinel's connections have only a weak reference to it.
        self._where = where
        self._prefix = options.prefix
        self._base = f"{options.prefix}:".encode()
        address = self._connect(where, options)
        self.name = f"{address}{'&' if '?' in address else '?'}prefix={options.prefix}"
        self.timeouts = Timeouts(options.timeout, options.connect_timeout)
        self.limits = Limits()
        self._may_publish = True
        self._durability = Durability(
            Survives.NONE, {}, ("not known before the store is open",)
        )

    def _connect(self, where: Any, options: RedisOptions) -> str:
        """Prepare connections, and return the address for people to read."""
        pool = pool_of(where, options.pool_size, options.connect_timeout)
        self._server: Server | Nodes = Server(pool, options.pool_size)
        database = pool.connection_kwargs.get("db") or 0
        self._channel = self._base + b"changes:%d" % database
        self._keys_to_create = [self._base + b"rehearsal", self._base + b"schema"]
        return name_of(where, pool)

    @classmethod
    def from_url(cls, url: str, options: RedisOptions) -> RedisStore:
        return cls(url, options)

    @classmethod
    async def inspect(cls, url: str, options: RedisOptions) -> StoreInfo | None:
        """Read the version; ``None`` where the server does not answer."""
        store = cls.from_url(url, options)
        key = store._base + b"schema"

        try:
            async with asyncio.timeout(options.connect_timeout):
                [found] = await store._server.ask(key, ("GET", key))
        except (StoreFailure, TimeoutError):
            return None
        finally:
            await store.close()

        if isinstance(found, Exception):
            return None

        return StoreInfo(found is not None, None if found is None else _version(found))

    async def open(self) -> None:
        # Nothing is written before it is certain that the server can be used.
        names = (*SETTINGS, *_LIMITS)
        keys = self._keys_to_create
        found, answer, *answers = await self._server.ask(
            keys[1],
            ("GET", keys[1]),
            ("INFO",),
            *(("CONFIG", "GET", name) for name in names),
        )
        info: dict[str, str] = {}
        config: dict[str, str] = {}

        if not isinstance(answer, Exception):
            lines = answer.decode(errors="replace").splitlines()
            info = dict(line.split(":", 1) for line in lines if ":" in line)

        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, list) and answer:
                config[name] = answer[1].decode()

        if info.get("redis_mode") == "cluster" and not self._in_cluster:
            raise StoreFailure("rejected", NO_CLUSTER)

        if isinstance(found, Exception):
            refused = refusal(found, "", b"")

            if isinstance(refused, CorruptThread):
                raise SchemaMismatch(self.name, refused.reason, SCHEMA_VERSION)

            raise refused from found

        self._check_version(found)

        try:
            [answer] = await self._run(keys, [(b"create", SCHEMA_VERSION)])
            created = outcome(answer, "", keys[0])

            if isinstance(created, Exception):
                raise created

            self._check_version(created)
        except StoreFailure as refused:
            # An existing store can be opened and read while the server refuses writes.
            if found is None or code_of(refused.reason) not in UNWRITABLE:
                raise

        # Half of the server's limit: messages are sent with a separator each, and a
        # message may be a single byte. A restore is sent in parts, so it has no limit.
        largest = min(int(config.get(name, _LIMITS[name])) for name in _LIMITS) // 2
        self.limits = Limits(
            max_value=largest, max_append=largest, max_restore=Limits().max_append
        )
        self._durability = durability_of(config, info, self._in_cluster)

    async def close(self) -> None:
        await self._server.close()

    def durability(self) -> Durability:
        return self._durability

    # Writes

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        # The handle hands over a restored thread alone.
        if isinstance(batch[0], Restore):
            return [await self._restore(batch[0])]

        groups = grouped(batch, self.limits.max_append)
        keys = [slot_of(self._prefix, group[0].thread_id) for group in groups]
        answers = await self._run(keys, [*map(operation, groups)], writes=True)
        outcomes: list[Outcome] = []

        for group, key, answer in zip(groups, keys, answers, strict=True):
            found = outcome(answer, group[0].thread_id, key)
            outcomes += outcomes_of(group, found)

            if isinstance(found, StoreFailure) and code_of(found.reason) == "READONLY":
                await self._server.reconnect()

        return outcomes

    async def _restore(self, write: Restore) -> Outcome:
        """Copy a thread to keys of its own, and rename them in one operation."""
        slot = slot_of(self._prefix, write.thread_id)
        copy = slot + f"copy-{uuid4().hex}:".encode()
        lifetime = int(self.timeouts.operation or 0) + 60

        try:
            sizes = await copy_thread(self._server.ask, write, copy, lifetime)
        except (StoreFailure, asyncio.CancelledError) as exc:
            # Nothing of the thread is written yet.
            if isinstance(exc, StoreFailure):
                with suppress(StoreFailure):
                    keys = [copy + kind for kind in KINDS]
                    await self._server.ask(copy, ("UNLINK", *keys))

                if exc.fate == "rejected":
                    raise

            raise StoreFailure("not sent", f"copying was interrupted: {exc}") from exc

        rename = [b"restore", write.thread_id.encode(), copy, sizes]
        [answer] = await self._run([slot], [rename], writes=True)
        return outcome(answer, write.thread_id, slot)  # type: ignore[no-any-return]

    # Reads

    async def snapshot(self, thread_id: str, decode: Decode) -> Snapshot | None:
        slot = slot_of(self._prefix, thread_id)
        times, messages, extra, pending = await self._read(
            thread_id,
            ("HGETALL", slot + b"t"),
            ("LRANGE", slot + b"m", 0, -1),
            ("HGETALL", slot + b"x"),
            ("HGETALL", slot + b"p"),
        )

        if b"created" not in times:
            if messages or extra or pending:
                raise CorruptThread(thread_id, repr(slot + b"t"), "it has no times")

            return None

        calls = decode_calls(thread_id, pending)
        decoded = await decode_rows(decode, messages, 0)
        return Snapshot(decoded, list(extra.items()), calls)

    async def messages(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> list[Any]:
        key = slot_of(self._prefix, thread_id) + b"m"
        # LRANGE counts as Python does, from the end too, but includes the last one.
        first, last = (1, 0) if stop == 0 else (start, -1 if stop is None else stop - 1)
        version, found = await self._read(
            thread_id, ("LLEN", key), ("LRANGE", key, _near(first), _near(last))
        )
        return await decode_rows(decode, found, span(start, stop, version)[0])

    async def holder(self, key: str) -> StoredCall | None:
        slot = slot_of(self._prefix, key)
        found: StoredCall | None = await self._find(slot, b"find")
        return found

    # Optional abilities

    async def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        if thread_ids is None:
            found = await self.threads("", None, sys.maxsize, True)
            thread_ids = [info.thread_id for info in found]

        ask_each = self._server.ask_each
        return await listen.markers(ask_each, self._prefix, thread_ids)

    async def announce(self, thread_ids: Sequence[str]) -> bool:
        if self._may_publish:
            try:
                commands = [(self._publish, self._channel, one) for one in thread_ids]
                answers = await self._server.ask(self._channel, *commands)
                return listen.is_heard(answers)
            except NoPermissionError:
                self._may_publish = False

        return False

    async def listen(self, heard: Heard) -> None:
        pool = pool_of(self._where, 1, self.timeouts.retry)
        await listen.listen(pool, self._channel, heard)

    async def threads(
        self, prefix: str, after: str | None, limit: int, erased: bool
    ) -> list[ThreadInfo]:
        key = self._base + b"threads"
        end = prefix_end(prefix)
        high = b"+" if end is None else b"(" + end.encode()
        low = b"[" + prefix.encode() if prefix else b"-"
        found: list[ThreadInfo] = []

        if after is not None and after >= prefix:
            low = b"(" + after.encode()

        while len(found) < limit:
            size = min(limit - len(found), _PAGE)
            rows = await self._find(key, b"list", low, high, size, int(erased))
            # By bytes of UTF-8, which is the order of code points.
            rows.sort(key=itemgetter(0))
            found += [decode_thread(*row) for row in rows[:size]]

            if len(rows) < size:
                break

            low = b"(" + rows[size - 1][0]

        return found

    async def calls(self, thread_id: str) -> list[StoredCall]:
        slot = slot_of(self._prefix, thread_id)
        found = await self._read(
            thread_id, ("HGETALL", slot + b"p"), ("HGETALL", slot + b"c")
        )
        return decode_calls(thread_id, *found)

    async def dump(self, thread_id: str) -> StoredDump | None:
        slot = slot_of(self._prefix, thread_id)
        times, messages, extra, *hashes = await self._read(
            thread_id,
            ("HGETALL", slot + b"t"),
            ("LRANGE", slot + b"m", 0, -1),
            *(("HGETALL", slot + kind) for kind in (b"x", b"p", b"c")),
        )
        calls = decode_calls(thread_id, *hashes)

        if b"created" not in times:
            if messages or extra or not all(call.erased for call in calls):
                raise CorruptThread(thread_id, repr(slot + b"t"), "it has no times")

            return StoredDump([], [], calls, None, None) if calls else None

        try:
            created, updated = int(times[b"created"]), int(times[b"updated"])
        except (KeyError, ValueError) as exc:
            raise CorruptThread(thread_id, repr(slot + b"t"), repr(exc)) from exc

        return StoredDump(messages, list(extra.items()), calls, created, updated)

    # The way to the server

    async def _read(self, thread_id: str, *commands: tuple[Any, ...]) -> list[Any]:
        """Return the answers to commands that all see the thread at one moment."""
        *queued, answers = await self._server.ask(
            commands[0][1], ("MULTI",), *commands, ("EXEC",)
        )

        if isinstance(answers, Exception):
            refused = next(
                (one for one in queued if isinstance(one, Exception)), answers
            )

            if not isinstance(refused, OutOfMemoryError):
                raise failure(refused) from refused

            # A full server queues nothing for a transaction, not even reads.
            keys = [key for _, key, *_ in commands]
            reads = [(b"read", name, *(*rest, 0, 0)[:2]) for name, _, *rest in commands]
            answers = await self._run(keys, reads)
            answers = [
                outcome(answer, thread_id, key)
                for key, answer in zip(keys, answers, strict=True)
            ]

        for i, (name, key, *_) in enumerate(commands):
            if isinstance(answer := answers[i], ResponseError):
                raise refusal(answer, thread_id, key) from answer

            if isinstance(answer, Exception):
                raise answer

            if name == "HGETALL":
                answers[i] = dict(zip(answer[::2], answer[1::2], strict=True))

        return answers  # type: ignore[no-any-return]  # redis-py has no type for it

    async def _find(self, key: bytes, *query: Any) -> Any:
        """Return the answer to an operation that may be repeated."""
        [answer] = await self._run([key], [query])
        found = outcome(answer, "?", key)

        if isinstance(found, Exception):
            raise found

        return found

    async def _run(
        self,
        keys: Sequence[bytes],
        operations: Sequence[Sequence[Any]],
        *,
        writes: bool = False,
    ) -> list[Any]:
        """Run operations of the script; send it where the server does not know it."""
        rest = [*self._arguments(keys), *(word for one in operations for word in one)]
        [answers] = await self._server.ask(
            keys[0], ("EVALSHA", SHA, *rest), writes=writes
        )

        if isinstance(answers, NoScriptError):
            [answers] = await self._server.ask(
                keys[0], ("EVAL", SCRIPT, *rest), writes=writes
            )

        if isinstance(answers, Exception):
            raise failure(answers) from answers

        return answers  # type: ignore[no-any-return]  # redis-py has no type for it

    def _arguments(self, keys: Sequence[bytes]) -> list[Any]:
        """Return what a call of the script begins with."""
        return [len(keys), *keys, self._base]

    def _check_version(self, found: Any) -> None:
        if found is not None and _version(found) != SCHEMA_VERSION:
            raise SchemaMismatch(self.name, _version(found), SCHEMA_VERSION)


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


def _near(position: int) -> int:
    """Return the position, or one beyond any list that Redis takes for a number."""
    return max(-(2**53), min(position, 2**53))


def _version(found: bytes) -> int | str:
    return int(found) if found.isdigit() else found.decode(errors="replace")
