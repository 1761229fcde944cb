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
    As the server is configured; read when the handle opens. ``appendfsync always`` with
    ``aof-load-truncated no`` survives a power loss. The server's log has no checksums,
    so the file system must leave no holes in what was appended. ``everysec`` survives a
    kill of the server; a power loss can lose about the last second.

    A power loss, or a kill in a large write, can leave the log with the beginning of a
    transaction. With ``aof-load-truncated yes``, the default, the server may keep it,
    and the next transaction completes it: after one more restart, half of a write that
    was never acknowledged can be seen, and a key can have two pending calls. With
    ``no`` the server refuses to start on such a log, until ``redis-check-aof --fix``
    has removed the whole transaction.

    Without an append-only file a restart loses everything since the last snapshot. A
    server that evicts keys when its memory is full can lose any write. A failover to a
    replica can lose acknowledged writes, because the server answers before its replicas
    have them.

What is atomic
    Each write. The writes of a batch are one call of ``operations.lua``: one round
    trip, one transaction in the append-only file. A restored thread is first copied to
    keys of its own, in parts, and one operation renames them; the copy of a process
    that died expires, except perhaps for one part of a megabyte that had no ``EXPIRE``
    yet. A load is repeated where the thread changed meanwhile. The client
    library repeats nothing: a write whose answer was lost raises ``BackendUnavailable``
    with ``maybe_applied``, a read is repeated.

Permissions
    Redis 6.2 or newer::

        ACL SETUSER agent on >password ~cpkit:* -@all +select +eval +evalsha
            +set +get +exists +unlink +rename +expire +persist +time +rpush +llen
            +lrange +hset +hget +hmget +hdel +hexists +hlen +hgetall +zadd +zrem +zscore
            +zrevrange +zrangebyscore +zrangebylex +client|id +client|kill
            +publish +subscribe +unsubscribe +ping resetchannels &cpkit:*
            +config|get +info

    The last line is only for the durability. The one before it lets changes wake a
    watch, which polls without it. Without the two ``client`` rights, a large write that
    was given up because the server was stopped may be applied after later operations.

Caveats
    A node of a Redis Cluster is refused, and nothing is written: `cpkit_redis.cluster`
    has the URL for it. No key expires except those of an unfinished restore, and in a
    cluster the notes on removed claims. No command searches keys by pattern. Two stores
    in one database are two prefixes. The server does nothing else while it runs a
    script: an append of 64 MiB takes it about a third of a second.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from operator import itemgetter
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

from pydantic import Field, PositiveInt
from redis.asyncio import Redis
from redis.exceptions import NoScriptError

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
from cpkit_redis.address import URL_OPTIONS, name_of, pool_of
from cpkit_redis.durability import SETTINGS, durability_of
from cpkit_redis.errors import (
    NO_CLUSTER,
    UNWRITABLE,
    code_of,
    failure,
    not_sent,
    refusal,
)
from cpkit_redis.listen import listen
from cpkit_redis.nodes import Nodes
from cpkit_redis.operations import (
    SCRIPT,
    SHA,
    checked,
    copy_thread,
    operation,
    outcome,
    words,
)
from cpkit_redis.schema import (
    KINDS,
    SCHEMA_VERSION,
    Layout,
    decode_call,
    decode_calls,
    decode_thread,
)
from cpkit_redis.server import Server

__all__ = ["RedisCheckpointer", "RedisStore"]

MessageT = TypeVar("MessageT")

# The fields of a thread that are its marker. Each change makes one of the times later,
# except a restore: it sets the times of the dump, and a new token.
_MARKER = ("created", "updated", "first", "last", "late", "restored")

# Threads in one round trip; few, because the server does nothing else meanwhile.
_PAGE = 1000

# Greater than any id, because ids are UTF-8.
_LAST_ID = b"\xff"

# Settings that limit one argument and one command, and their defaults.
_LIMITS = {"proto-max-bulk-len": 512 * 1024**2, "client-query-buffer-limit": 1024**3}

# An upper bound for the bytes of a call's record without its args and its result.
_FIELDS = 4096


class RedisOptions(ServerOptions):
    """``prefix`` starts every key; ``pool_size`` limits the connections."""

    prefix: str = Field(default="cpkit", min_length=1, pattern=r"^[^{}]+$")
    pool_size: PositiveInt = 8


class RedisStore:
    """A store in a Redis database; ``where`` is a URL or a client of redis.asyncio."""

    Options: ClassVar[type[DriverOptions]] = RedisOptions
    client_options: ClassVar[frozenset[str]] = URL_OPTIONS
    # A restore takes several round trips, and other writes should not wait for it.
    batching = Batching(
        halves=True, kinds=(Append, Merge, Claim, Resolve, Erase), merges_appends=True
    )
    erases = True
    _in_cluster = False
    _publish = "PUBLISH"
    _shards = 1

    def __init__(self, where: str | Redis, options: RedisOptions) -> None:
        # Kept alive here: a Sentinel's connections have only a weak reference to it.
        self._where = where
        self._layout = Layout(options.prefix, self._shards)
        address = self._connect(where, options)
        self.name = f"{address}{'&' if '?' in address else '?'}prefix={options.prefix}"
        self.timeouts = Timeouts(
            options.timeout, options.connect_timeout, cancels_reads=True
        )
        self.limits = Limits()
        self._may_publish = True
        self._durability = Durability(
            Survives.NONE, {}, ("not known before the store is open",)
        )

    def _connect(self, where: Any, options: RedisOptions) -> str:
        """Prepare connections, and return the address for people to read."""
        pool = pool_of(
            where, options.pool_size, options.connect_timeout, options.timeout
        )
        self._server: Server | Nodes = Server(pool, options.pool_size)
        database = pool.connection_kwargs.get("db") or 0
        self._channel = f"{options.prefix}:changes:{database}".encode()
        return name_of(where, pool)

    @classmethod
    def from_url(cls, url: str, options: RedisOptions) -> RedisStore:
        return cls(url, options)

    @classmethod
    async def inspect(cls, url: str, options: RedisOptions) -> StoreInfo | None:
        """Read the version; ``None`` where the server does not answer."""
        store = cls.from_url(url, options)
        key = store._layout.schema

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
        schema = self._layout.schema
        found, answer, *answers = await self._server.ask(
            schema,
            ("GET", schema),
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
            refused = refusal(found, "", schema)

            if isinstance(refused, CorruptThread):
                raise SchemaMismatch(self.name, refused.reason, SCHEMA_VERSION)

            raise refused from found

        self._check_version(found)

        try:
            await self._create()
        except StoreFailure as refused:
            # An existing store can be opened and read while the server refuses writes.
            if found is None or code_of(refused.reason) not in UNWRITABLE:
                raise

        # Half of the server's limit: messages are sent with a separator each, and a
        # message may be a single byte. A restored call is one argument with all its
        # fields. A restore is sent in parts, so it has no limit.
        limit = min(int(config.get(name, _LIMITS[name])) for name in _LIMITS)
        largest = (limit - _FIELDS) // 2
        self.limits = Limits(
            max_value=largest, max_append=largest, max_restore=Limits().max_append
        )
        self._durability = durability_of(config, info, self._in_cluster)

    async def _create(self) -> None:
        shard = self._layout.shards[0]
        # The second key is a test: a node of a cluster refuses keys in two slots.
        keys = [shard] if self._in_cluster else [shard, self._channel]
        arguments = [len(keys), *keys, *words(b"create", SCHEMA_VERSION)]
        [answers] = await self._server.ask(shard, ("EVAL", SCRIPT, *arguments))

        if isinstance(answers, Exception):
            raise failure(answers) from answers

        self._check_version(checked(answers[0], shard)[1])

    async def close(self) -> None:
        await self._server.close()

    def durability(self) -> Durability:
        return self._durability

    # Writes

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        # The handle hands over a restored thread alone.
        if isinstance(batch[0], Restore):
            return [await self._restore(batch[0])]

        places: dict[bytes, list[int]] = {}

        for at, write in enumerate(batch):
            places.setdefault(self._layout.shard_of(write.thread_id), []).append(at)

        answers = await self._run(
            [
                (shard, [operation(batch[at]) for at in some])
                for shard, some in places.items()
            ],
            once=True,
        )
        outcomes: list[Outcome] = [None] * len(batch)

        for (shard, some), found in zip(places.items(), answers, strict=True):
            for at, answer in zip(some, found, strict=True):
                outcomes[at] = outcome(answer, shard, batch[at].thread_id)

        if any(
            isinstance(one, StoreFailure) and code_of(one.reason) == "READONLY"
            for one in outcomes
        ):
            await self._server.reconnect()

        return outcomes

    async def _restore(self, write: Restore) -> Outcome:
        """Copy a thread to keys of its own, and rename them in one operation."""
        token, thread_id = self._new_token(), write.thread_id
        copy = self._layout.shard_of(thread_id) + b"copy-%b:" % uuid4().hex.encode()
        lifetime = int(self.timeouts.operation or 0) + 60
        is_sent = False

        try:
            sizes = await copy_thread(self._server.ask, write, copy, lifetime, token)
            found = await self._reserve(write, token)

            if found is None:
                is_sent = True
                arguments = (thread_id.encode(), copy, sizes, token)
                answer = await self._step(thread_id, b"restore", *arguments)
                found = outcome(answer, copy, thread_id)
        except asyncio.CancelledError as exc:
            if is_sent:
                raise

            # The copy expires.
            raise StoreFailure("not sent", "copying was interrupted") from exc
        except StoreFailure as exc:
            if is_sent and exc.fate == "unknown":
                raise

            found = not_sent(exc)

        if found is not None:
            with suppress(StoreFailure, TimeoutError):
                async with asyncio.timeout(1):
                    await self._undo_restore(write, token, copy)

        return found

    def _new_token(self) -> bytes:
        return b""

    async def _reserve(self, write: Restore, token: bytes) -> Outcome:
        """Reserve what is in other shards than the thread; return what prevents it."""
        return None

    async def _undo_restore(self, write: Restore, token: bytes, copy: bytes) -> None:
        await self._server.ask(copy, ("UNLINK", *(copy + kind for kind in KINDS)))

    # Reads

    async def snapshot(self, thread_id: str, decode: Decode) -> Snapshot | None:
        times, messages, extra, pending = await self._read(
            thread_id, ("LRANGE", b"m", 0, -1), ("HGETALL", b"x"), ("HGETALL", b"p")
        )

        if b"created" not in times:
            if messages or extra or pending:
                raise CorruptThread(thread_id, "its times", "they are missing")

            return None

        calls = decode_calls(thread_id, pending)
        decoded = await decode_rows(decode, messages, 0)
        return Snapshot(decoded, list(extra.items()), calls)

    async def messages(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> list[Any]:
        # LRANGE counts as Python does, from the end too, but includes the last one.
        first, last = (1, 0) if stop == 0 else (start, -1 if stop is None else stop - 1)
        # The length is only for errors, which name the position of a message. So it
        # may be of another moment than the messages.
        version, found = await self._ask(
            thread_id, ("LLEN", b"m"), ("LRANGE", b"m", _clamp(first), _clamp(last))
        )
        return await decode_rows(decode, found, span(start, stop, version)[0])

    async def holder(self, key: str) -> StoredCall | None:
        word, *found = await self._step(key, b"find", key.encode(), once=False)
        return decode_call(*found) if word == b"call" else None

    # Optional abilities

    async def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        if thread_ids is None:
            found = await self.threads("", None, sys.maxsize, True)
            thread_ids = [info.thread_id for info in found]

        markers: dict[str, Hashable] = {}

        for start in range(0, len(thread_ids), _PAGE):
            some = thread_ids[start : start + _PAGE]
            keys = [self._layout.key(b"t", one) for one in some]
            answers = await self._server.ask_each(
                [(key, ("HMGET", key, *_MARKER)) for key in keys]
            )

            for thread_id, key, answer in zip(some, keys, answers, strict=True):
                if isinstance(answer, Exception):
                    raise refusal(answer, thread_id, key) from answer

                if any(answer):
                    markers[thread_id] = tuple(answer)

        return markers

    async def announce(self, thread_ids: Sequence[str]) -> bool:
        if not self._may_publish:
            return False

        commands = [(self._publish, self._channel, one) for one in thread_ids]
        answers = await self._server.ask(self._channel, *commands)

        for answer in answers:
            if isinstance(answer, Exception):
                # Without the right, or in a cluster before Redis 7, listeners poll.
                self._may_publish = failure(answer).fate != "rejected"
                return False

        return any(answers)

    async def listen(self, heard: Heard) -> None:
        limit = self.timeouts.retry
        pool = pool_of(self._where, 1, limit, limit)
        await listen(pool, "SUBSCRIBE", self._channel, heard)

    async def threads(
        self, prefix: str, after: str | None, limit: int, erased: bool
    ) -> list[ThreadInfo]:
        end = prefix_end(prefix)
        high = b"+" if end is None else b"(" + end.encode()
        low = b"[" + prefix.encode() if prefix else b"-"
        found: list[ThreadInfo] = []

        if after is not None and after >= prefix:
            low = b"(" + after.encode()

        while len(found) < limit:
            wanted = min(limit - len(found), _PAGE)
            # Ids are not spread evenly: ask each shard for a few more than its share.
            size = min(wanted, 2 * wanted // self._shards + 8)
            query = [words(b"list", low, high, size, int(erased))]
            pages = await self._run([(one, query) for one in self._layout.shards])
            rows: list[Any] = []
            complete_to = _LAST_ID

            for shard, [answer] in zip(self._layout.shards, pages, strict=True):
                # By bytes of UTF-8, which is the order of code points.
                page = sorted(checked(answer, shard)[1:], key=itemgetter(0))[:size]
                rows += page

                if len(page) == size:  # the shard may have more behind it
                    complete_to = min(complete_to, page[-1][0])

            rows = [row for row in rows if row[0] <= complete_to]
            rows = sorted(rows, key=itemgetter(0))[:wanted]
            found += [decode_thread(*row) for row in rows]

            if complete_to == _LAST_ID and len(rows) < wanted:
                break

            low = b"(" + rows[-1][0]

        return found

    async def calls(self, thread_id: str) -> list[StoredCall]:
        _, *found = await self._read(thread_id, ("HGETALL", b"p"), ("HGETALL", b"c"))
        return decode_calls(thread_id, *found)

    async def dump(self, thread_id: str) -> StoredDump | None:
        times, messages, extra, *hashes = await self._read(
            thread_id,
            ("LRANGE", b"m", 0, -1),
            *(("HGETALL", kind) for kind in (b"x", b"p", b"c")),
        )
        calls = decode_calls(thread_id, *hashes)

        if b"created" not in times:
            if messages or extra or not all(call.erased for call in calls):
                raise CorruptThread(thread_id, "its times", "they are missing")

            return StoredDump([], [], calls, None, None) if calls else None

        try:
            created, updated = int(times[b"created"]), int(times[b"updated"])
        except (KeyError, ValueError) as exc:
            raise CorruptThread(thread_id, "its times", repr(exc)) from exc

        return StoredDump(messages, list(extra.items()), calls, created, updated)

    # The way to the server

    async def _read(self, thread_id: str, *queries: tuple[Any, ...]) -> list[Any]:
        """Return a thread's times, and the answers to queries, of one moment.

        Every change of a thread sets a later time, or the token of a restore: where
        all fields are the same before and after, nothing changed.
        """
        times = ("HGETALL", b"t")

        while True:
            *found, after = await self._ask(thread_id, times, *queries, times)

            if found[0] == after:
                return found

    async def _ask(self, thread_id: str, *queries: tuple[Any, ...]) -> list[Any]:
        """Return the answers to queries: a command, a kind of key, and the rest."""
        commands = [
            (name, self._layout.key(kind, thread_id), *rest)
            for name, kind, *rest in queries
        ]
        answers = await self._server.ask(commands[0][1], *commands)

        for i, (name, key, *_) in enumerate(commands):
            if isinstance(answer := answers[i], Exception):
                raise refusal(answer, thread_id, key) from answer

            if name == "HGETALL":
                answers[i] = dict(zip(answer[::2], answer[1::2], strict=True))

        return answers

    async def _step(
        self, one_id: str, name: bytes, *arguments: Any, once: bool = True
    ) -> list[Any]:
        """Run one operation in the shard of a thread or a key, and return its answer.

        ``once`` is false where it does no harm to run the operation twice.
        """
        shard = self._layout.shard_of(one_id)
        operations = [words(name, *arguments)]
        [[answer]] = await self._run([(shard, operations)], once=once)
        return checked(answer, shard)

    async def _run(
        self,
        scripts: Sequence[tuple[bytes, Sequence[list[Any]]]],
        *,
        once: bool = False,
    ) -> list[list[Any]]:
        """Run the script once for each shard, with the shard's operations.

        Returns for each shard the answers to its operations; if its script failed, the
        same failure is the answer to each of them.
        """
        sent = [(shard, [1, shard, *chain(*some)]) for shard, some in scripts]
        answers = await self._server.ask_each(
            [(shard, ("EVALSHA", SHA, *rest)) for shard, rest in sent], once=once
        )
        unloaded = [
            at for at, one in enumerate(answers) if isinstance(one, NoScriptError)
        ]

        if unloaded:
            again = [(sent[at][0], ("EVAL", SCRIPT, *sent[at][1])) for at in unloaded]
            found: list[Any]

            try:
                found = await self._server.ask_each(again, once=once)
            except StoreFailure as failed:  # of these alone: the others have run
                found = [failed] * len(again)

            for at, answer in zip(unloaded, found, strict=True):
                answers[at] = answer

        return [
            [failure(answer)] * len(some) if isinstance(answer, Exception) else answer
            for answer, (_, some) in zip(answers, scripts, strict=True)
        ]

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


def _clamp(position: int) -> int:
    """Return the position, or the nearest one that Redis can read as a number."""
    return max(-(2**53), min(position, 2**53))


def _version(found: bytes) -> int | str:
    if found.isdigit() and len(found) < 20:  # Python reads 4,300 digits at most
        return int(found)

    return found[:100].decode(errors="replace")
