"""Agent state in Redis, for any number of processes on any number of machines.

URL forms
    ``redis://user:password@host:6379/0``, ``rediss://`` (TLS, with redis-py's ``ssl_*``
    parameters in the query: ``ssl_ca_certs=/path/ca.pem``) and
    ``redis+unix:///path/to/socket?db=0``. Options: ``prefix`` (``cpkit``) of all keys,
    ``pool_size`` (8) connections at most, ``connect_timeout`` (10), the seconds for
    which a server that cannot be reached is tried again, ``timeout`` (30), the seconds
    that it has to answer, and those of every driver. In place of the URL a client of
    redis.asyncio will do, a Sentinel's ``master_for`` too: its settings are used for
    connections of the handle's own, and it is not closed.

Durability
    As the server has it, read when the handle opens (`RedisCheckpointer.durability`):
    ``appendfsync always`` survives a power loss; ``everysec`` a kill, and a power loss
    can take about the last second; without an append-only file a restart takes all
    since the last snapshot. Where keys are evicted when memory is full, any write may
    be lost. A failover to a replica can lose writes that were acknowledged, because
    replicas are written to after the answer.

What is atomic
    Each operation is one round trip (a list of threads one for each thousand), and each
    write is made by a script, which the server runs alone and logs as one transaction.
    Writes that queue while one is under way go out together, in one call for each kind.
    A load is one transaction of plain reads. Nothing is retried by the client library:
    a write whose answer was lost raises ``BackendUnavailable`` with ``maybe_applied``,
    a read is made again.

In a cluster
    Not yet: scripts compute some of their keys. The layout is ready for it
    (`cpkit_redis.layout`). All keys of a thread are in one slot. A new thread is put on
    the list of threads, a slot of its own, before anything else, and its times are set
    last. A claim writes to its thread's slot and then to that of its idempotency key:
    the key's register is the commit point, and what the thread's slot has of a call is
    nothing until the register names it. So a crash between two steps leaves something
    that readers pass over, or a call that is wholly there.

Permissions
    Redis 6.2 or newer. What a user needs, the last line for `durability` alone::

        ACL SETUSER agent on >password ~cpkit:* -@all +select +multi +exec +eval
            +evalsha +set +get +exists +unlink +time +rpush +llen +lrange +hset +hget
            +hmget +hdel +hlen +hgetall +zadd +zrem +zscore +zrevrange +zrangebylex
            +config|get +info

Caveats
    Keys never expire and none is looked for by pattern. Two stores in a database are
    two prefixes. Redis before 7 takes a million messages in one append at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, Generic, Self, TypeVar

from pydantic import Field, PositiveInt
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError, ResponseError

from cpkit.driver.coalescing import Coalescer
from cpkit.driver.codec import Codec, check_same_call
from cpkit.driver.ids import check_id, check_page, span
from cpkit.driver.lifetime import Lifetime
from cpkit.driver.writes import Append, Erase, StoredCall, Write
from cpkit.errors import BackendUnavailable, CorruptThread
from cpkit.records import (
    CallRecord,
    CheckpointData,
    Durability,
    JsonValue,
    Survives,
    ThreadInfo,
    ToolCall,
)
from cpkit.registry import DriverOptions
from cpkit_redis.address import URL_OPTIONS, name_of, pool_of_client, pool_of_url
from cpkit_redis.durability import QUESTIONS, durability_of, settings_of
from cpkit_redis.faults import NO_CLUSTER, UNWRITABLE, code_of, text_of, translated
from cpkit_redis.layout import SCHEMA_VERSION, check_version, register_of, slot_of
from cpkit_redis.operations import (
    FIND,
    LIST,
    READ,
    REHEARSE,
    arguments,
    bounds,
    call_of,
    calls_of,
    grouped,
    listing,
    outcome_of,
    pairs,
    pending_of,
    size_of,
    thread_info,
)
from cpkit_redis.scripting import Script, call_scripts
from cpkit_redis.wire import Wire

__all__ = ["RedisCheckpointer"]

MessageT = TypeVar("MessageT")

# Threads that one call lists: a script holds up everybody else on the server.
_PAGE = 1000


class RedisOptions(DriverOptions):
    """``connect_timeout`` and ``timeout`` in seconds; see the module's manual."""

    prefix: str = Field(default="cpkit", min_length=1, pattern=r"^[^{}]+$")
    pool_size: PositiveInt = 8
    connect_timeout: float = Field(10.0, gt=0, le=86_400)
    timeout: float = Field(30.0, gt=0, le=86_400)


class RedisCheckpointer(Generic[MessageT]):
    """A store in a Redis database.

    ``where`` is a URL or a client of redis.asyncio that does not decode responses.
    Options as in the URL.
    """

    Options: ClassVar[type[DriverOptions]] = RedisOptions
    client_options: ClassVar[frozenset[str]] = URL_OPTIONS

    def __init__(
        self,
        where: str | Redis,
        *,
        message_type: type[MessageT] | Any = dict,
        **options: Any,
    ) -> None:
        known = RedisOptions(**options)
        self._prefix = known.prefix
        self._base = f"{known.prefix}:".encode()
        self._codec: Codec[MessageT] = Codec(
            message_type,
            max_payload=known.max_payload,
            strict_roundtrip=known.strict_roundtrip,
        )
        pool = (
            pool_of_url(where, known.connect_timeout)
            if isinstance(where, str)
            else pool_of_client(where)
        )
        self._lifetime = Lifetime(name_of(pool))
        self._wire = Wire(
            pool,
            self._lifetime.name,
            size=known.pool_size,
            patience=known.connect_timeout,
            timeout=known.timeout,
        )
        self._writes: Coalescer[Write] = Coalescer(
            self._lifetime, self._commit, size_of, by_halves=True
        )
        self._durability = Durability(
            Survives.NONE, {}, ("not known before it is open",)
        )

    @classmethod
    def from_url(
        cls, url: str, *, message_type: Any, options: RedisOptions
    ) -> RedisCheckpointer[Any]:
        return cls(url, message_type=message_type, **options.model_dump())

    async def __aenter__(self) -> Self:
        self._lifetime.begin()

        try:
            await self._lifetime.finish(self._open())
        except BaseException:
            await self.aclose()
            raise

        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let what is in flight finish and disconnect; idempotent."""
        await self._lifetime.end(self._wire.aclose)

    async def _open(self) -> None:
        name = self._base + b"schema"
        created, found, *answers = await self._wire.ask(
            (b"SET", name, b"%d" % SCHEMA_VERSION, b"NX"),
            (b"GET", name),
            *QUESTIONS,
            again=True,
        )
        settings = settings_of(answers)

        if settings.get(b"redis_mode") == b"cluster":
            raise BackendUnavailable(self._lifetime.name, NO_CLUSTER)

        check_version(self._lifetime.name, created, found)
        self._durability = durability_of(settings)

        try:
            await self._find(REHEARSE, self._base + b"rehearsal")
        except BackendUnavailable as exc:
            # A server that takes no writes for now is good for reading.
            if code_of(exc.reason) not in UNWRITABLE:
                raise

    @property
    def durability(self) -> Durability:
        return self._durability

    def __repr__(self) -> str:
        return f"<RedisCheckpointer {self._lifetime.name} prefix={self._prefix!r}>"

    # The six methods

    async def load(self, thread_id: str) -> CheckpointData[MessageT] | None:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)
        slot = slot_of(self._prefix, thread_id)
        times, messages, extra, pending = await self._read(
            thread_id,
            (b"HLEN", slot + b"t"),
            (b"LRANGE", slot + b"m", b"0", b"-1"),
            (b"HGETALL", slot + b"x"),
            (b"HGETALL", slot + b"p"),
        )

        if not times:
            if messages or extra or pending:
                raise CorruptThread(thread_id, repr(slot + b"t"), "it is missing")

            return None

        return CheckpointData(
            self._codec.messages(messages, thread_id),
            self._codec.extra(pairs(extra), thread_id),
            [self._codec.record(call) for call in pending_of(thread_id, pending)],
        )

    async def append(
        self,
        thread_id: str,
        messages: Sequence[MessageT],
        *,
        expected_version: int | None = None,
    ) -> int:
        self._lifetime.check()
        write = self._codec.append(thread_id, messages, expected_version)
        version: int = await self._writes.run(write)
        return version

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        self._lifetime.check()
        write = self._codec.merge(thread_id, extra)

        if write.items:
            await self._writes.run(write)

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        self._lifetime.check()
        write = self._codec.claim(thread_id, call)
        stored: StoredCall | None = await self._writes.run(write)

        if stored is None:
            return None

        record = self._codec.record(stored)

        if stored[:2] == (write.thread_id, write.call.call_id):
            check_same_call(record, write.call)

        return record

    async def record_result(
        self,
        thread_id: str,
        call_id: str,
        result: JsonValue,
        *,
        success: bool = True,
    ) -> CallRecord:
        self._lifetime.check()
        write = self._codec.resolve(thread_id, call_id, result, success)
        return self._codec.record(await self._writes.run(write))

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        record = await self.find_call(idempotency_key)
        return record if record is not None and record.status == "completed" else None

    # The optional protocols

    async def list_threads(
        self, *, prefix: str = "", after: str | None = None, limit: int = 100
    ) -> list[ThreadInfo]:
        self._lifetime.check()
        prefix, after, limit = check_page(prefix, after, limit)
        found: list[ThreadInfo] = []

        while len(found) < limit:
            size = min(limit - len(found), _PAGE)
            page = await self._find(
                LIST, self._base + b"threads", *listing(prefix, after, size)
            )
            found += [thread_info(*row) for row in page[1:]]

            if len(page) <= size:
                break

            after = found[-1].thread_id

        return found

    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[MessageT]:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)
        span(start, stop, 0)  # a wrong argument raises even where there is no thread
        messages = slot_of(self._prefix, thread_id) + b"m"
        version, found = await self._read(
            thread_id,
            (b"LLEN", messages),
            (b"LRANGE", messages, *bounds(start, stop)),
        )
        first, _ = span(start, stop, version)
        return self._codec.messages(found, thread_id, first)

    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)
        slot = slot_of(self._prefix, thread_id)
        found = await self._read(
            thread_id, *((b"HGETALL", slot + kind) for kind in (b"i", b"r", b"a", b"v"))
        )
        calls = calls_of(thread_id, *found)
        return [self._codec.record(call) for call in calls]

    async def find_call(self, idempotency_key: str) -> CallRecord | None:
        self._lifetime.check()
        key = check_id("idempotency_key", idempotency_key)
        register = register_of(self._prefix, key)
        word, *found = await self._find(FIND, register, register)

        if word == b"unknown":
            return None

        last = call_of(*found)
        return None if last.status == "failed" else self._codec.record(last)

    async def delete_thread(self, thread_id: str, *, forget_keys: bool = False) -> None:
        self._lifetime.check()
        thread_id = check_id("thread_id", thread_id)
        await self._writes.run(Erase(thread_id, forget_keys))

    # The trips to the server

    async def _commit(self, writes: list[Write]) -> Sequence[object]:
        groups = grouped(writes)
        calls = [
            (
                script,
                [arguments([writes[i] for i in one], self._prefix) for one in made],
            )
            for script, made in groups.items()
        ]
        found = await call_scripts(self._wire, self._base, calls, again=False)
        outcomes: list[object] = [None] * len(writes)

        for made, answers in zip(groups.values(), found, strict=True):
            for one, answer in zip(made, answers, strict=True):
                for i in reversed(one):
                    write = writes[i]
                    outcomes[i] = self._outcome(write, answer)

                    if isinstance(answer, int) and isinstance(write, Append):
                        answer -= len(write.bodies)  # the version before it

        return outcomes

    def _outcome(self, write: Write, answer: Any) -> object:
        if not isinstance(answer, Exception):
            return outcome_of(write, answer)

        where = slot_of(self._prefix, write.thread_id) + b"*"
        return self._accepted(answer, where, write.thread_id)

    async def _find(self, script: Script, where: bytes, *arguments: bytes) -> Any:
        """Return the answer of an operation that may be repeated."""
        calls = [(script, [arguments])]
        [[answer]] = await self._lifetime.during(
            call_scripts(self._wire, self._base, calls, again=True)
        )
        answer = self._accepted(answer, where)

        if isinstance(answer, Exception):
            raise answer

        return answer

    async def _read(self, thread_id: str, *commands: Sequence[bytes]) -> list[Any]:
        """Return the answers to commands that all see one state of the thread."""
        queued = await self._lifetime.during(
            self._wire.ask((b"MULTI",), *commands, (b"EXEC",), again=True)
        )
        answers = queued.pop()
        refused = [answer for answer in queued if isinstance(answer, ResponseError)]

        if any(isinstance(answer, OutOfMemoryError) for answer in refused):
            # A full server queues nothing for a transaction, not even reads.
            [answers] = await self._lifetime.during(
                call_scripts(self._wire, self._base, [(READ, commands)], again=True)
            )
        elif isinstance(answers, ResponseError):
            answers = [*refused, answers][:1] * len(commands)

        accepted = [
            self._accepted(answer, command[1], thread_id)
            for command, answer in zip(commands, answers, strict=True)
        ]

        for answer in accepted:
            if isinstance(answer, Exception):
                raise answer

        return accepted

    def _accepted(self, answer: Any, where: bytes, thread_id: str | None = None) -> Any:
        """Return an answer, or for an error one of the contract, the caller's own.

        An error gathers the traceback of the caller that it goes to.
        """
        if isinstance(answer, BackendUnavailable):
            error: Exception = copy(answer)
            error.__cause__ = answer.__cause__
            return error

        if not isinstance(answer, ResponseError):
            return answer

        text = text_of(answer)

        if code_of(text) == "READONLY":
            # After a failover the address may be another server's by now.
            self._wire.renew()

        error = translated(text, self._lifetime.name, thread_id, where)
        error.__cause__ = answer
        return error
