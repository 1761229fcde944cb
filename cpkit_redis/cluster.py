"""Agent state in a Redis Cluster.

URL forms
    ``redis+cluster://user:password@host:6379,host:6379`` with one or more of the nodes,
    and ``rediss+cluster://`` (TLS). Options as for ``redis://``; ``pool_size`` is for
    each node. ``connect_timeout`` limits opening. Later operations follow moved slots
    and failovers for ``timeout`` seconds.

Where things are
    A store has 64 shards (`cpkit_redis.schema`), each in one slot, so that threads and
    claims spread over the nodes. A thread is in one shard, and so is its entry in the
    list of threads. With a tag in the prefix (``?prefix={agents}``) the store is one
    shard, on one node, and a claim is one step. ``agents`` and ``{agents}`` are two
    stores.

Claims
    The *register* of a key is the sorted set of its attempts. A *member* of it names a
    thread, a call id and a token. The thread and the register may be in two shards, so
    a claim takes three steps:

    1. *Prepare* (thread): write the call and a new token into ``w``, the thread's hash
       of prepared calls. This replaces the token of an earlier try of the same call
       that was not confirmed.
    2. *Enter* (register): add the member as the next attempt, if the register is empty
       or the newest member is known to have failed.
    3. *Confirm* (thread): make the prepared call a record, if it still has the token.
       Only then the caller is told that it holds the key.

    A caller that finds another member in the register confirms that member's call
    itself, and returns its record. If the thread has no call with the token, the member
    is *void*: the caller removes it and tries to enter again.

    Two callers never hold one key: a void member cannot be confirmed later. A member is
    entered after its token was written in its thread, and no token is written twice. So
    a token that is missing in the thread stays missing, and its confirmation fails.

    If the process dies after step 1, the prepared call holds nothing; a repetition of
    the same call replaces it. If it dies after step 2, the next caller of the key
    confirms the call. A lost answer has the same effect as such a death.

    A deletion removes the prepared calls, and keeps a note of their tokens for an hour.
    If the token of a claim has a note, the claim had no effect, and the handle repeats
    it. Without a note, the call may have been confirmed and then deleted, so the caller
    gets ``BackendUnavailable``. A
    deletion with ``forget_keys`` also removes the calls, which makes their members
    void. Then it removes the members.

    A restore copies the thread, marks it as ``begun`` with a token, and enters its
    members with that token. It renames the copy if the mark is still there. A caller
    that confirms one of these members before the rename removes the mark.

Durability
    A node answers before its replicas have a write. So a failover loses the last
    acknowledged writes, whatever ``appendfsync`` says; ``min-replicas-to-write`` limits
    how many. Set ``aof-load-truncated no`` on every node: with ``yes`` a node that lost
    power can lose the register's part of an acknowledged claim at its second restart.

    A claim is on two nodes. If a failover loses the register's part alone, the key can
    be claimed again: both calls are then on record in their threads, and
    ``find_completed`` and ``find_call`` know the newer one.

Permissions
    The permissions that `cpkit_redis.store` lists, and on every node::

        ACL SETUSER agent +cluster|slots +spublish +ssubscribe +sunsubscribe

    Without the last three, or before Redis 7, a watch polls.

Moved slots
    While a slot moves to another node, operations on its threads and keys wait, up to
    ``timeout``. A read that a node does not answer within a quarter of ``timeout`` is
    repeated, at the node that has the slot then.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pydantic import Field

from cpkit.driver import (
    Append,
    Batching,
    Claim,
    Conflict,
    Erase,
    Heard,
    KeyHeld,
    Merge,
    Outcome,
    Resolve,
    Restore,
    StoredCall,
    StoreFailure,
    Timeouts,
    Write,
)
from cpkit.errors import CorruptThread
from cpkit_redis.errors import not_sent
from cpkit_redis.listen import listen
from cpkit_redis.nodes import Nodes
from cpkit_redis.operations import operation, outcome, words
from cpkit_redis.schema import SHARDS, decode_call
from cpkit_redis.server import cancellation
from cpkit_redis.store import RedisOptions, RedisStore

__all__ = ["ClusterOptions", "ClusterStore", "SpreadStore"]

# Seconds between attempts to confirm a claim that was entered.
_PAUSE = 0.05

# What the step `confirm` answers if there is no call: it was never confirmed
# (``void``), or may have been (``gone``).
_NO_CALL = (b"void", b"gone")


class ClusterOptions(RedisOptions):
    """A ``{tag}`` in the ``prefix`` keeps the store in one slot."""

    prefix: str = Field(
        default="cpkit", min_length=1, pattern=r"^[^{}]*(\{[^{}]+\}[^{}]*)?$"
    )


class ClusterStore(RedisStore):
    """A store in one slot of a cluster.

    `from_url` makes a `SpreadStore` if the prefix has no tag.
    """

    Options = ClusterOptions
    _in_cluster = True
    _publish = "SPUBLISH"
    _server: Nodes

    @classmethod
    def from_url(cls, url: str, options: RedisOptions) -> ClusterStore:
        kind = ClusterStore if "{" in options.prefix else SpreadStore
        return kind(url, options)

    def _connect(self, where: Any, options: RedisOptions) -> str:
        self._server = Nodes(
            where, options.pool_size, options.connect_timeout, options.timeout
        )
        self._channel = f"{options.prefix}:changes".encode()
        scheme = where.partition("://")[0].lower()
        return f"{scheme}://{self._server.name}"

    async def open(self) -> None:
        await super().open()
        timeout = self.timeouts.operation
        assert timeout is not None
        # A cancelled read may raise `StoreFailure`: it waits for the map of slots.
        self.timeouts = Timeouts(timeout, timeout, cancels_reads=False)

    async def listen(self, heard: Heard) -> None:
        pool = await self._server.pool(self._channel)

        try:
            await listen(pool, "SSUBSCRIBE", self._channel, heard)
        except StoreFailure:
            await self._server.reconnect()
            raise


class SpreadStore(ClusterStore):
    """A store over all slots of a cluster."""

    # A claim, a deletion and a restore take several steps, so each is committed alone.
    batching = Batching(
        halves=True, kinds=(Append, Merge, Resolve), merges_appends=True
    )
    _shards = SHARDS

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        match batch[0]:
            case Claim():
                return [await self._claim(batch[0])]
            case Erase():
                return [await self._erase(batch[0])]

        return await super().commit(batch)

    async def holder(self, key: str) -> StoredCall | None:
        while True:
            word, *found = await self._step(key, b"newest", key.encode(), once=False)

            if word == b"unknown":
                return None

            if call := await self._holder_of(key, found[0], found[1]):
                return call

    # Claims

    async def _claim(self, write: Claim) -> Outcome:
        thread_id, key = write.thread_id, write.call.idempotency_key
        _, _, thread, call_id, *rest = operation(write)
        token = self._new_token()
        member = b"\0".join((thread, call_id, token))

        try:
            prepared = (thread, call_id, token, *rest)
            answer = await self._step(thread_id, b"prepare", *prepared)
        except StoreFailure as exc:
            raise not_sent(exc) from exc

        if answer[0] == b"call":
            return outcome(answer, b"", thread_id)

        attempt = await self._enter(key, member)

        if isinstance(attempt, StoredCall):
            with suppress(StoreFailure):
                await self._step(thread_id, b"withdraw", thread, call_id, token)

            return attempt

        is_cancelled = cancellation()

        while True:
            try:
                word, _ = await self._confirm(member, attempt)
            except StoreFailure as exc:
                # The next caller of the key may confirm the call, so the outcome is
                # unknown. The operation's time limit ends this loop.
                if exc.fate == "rejected" or is_cancelled():
                    raise StoreFailure("unknown", exc.reason) from exc

                await asyncio.sleep(_PAUSE)
                continue

            if word not in _NO_CALL:
                return None

            # With ``gone`` the call may have been confirmed, by another caller or by a
            # request whose answer was lost. It must not be claimed a second time.
            raise StoreFailure(
                "not sent" if word == b"void" else "unknown",
                "another writer deleted the call during the claim",
            )

    async def _enter(
        self,
        key: str,
        member: bytes,
        attempt: int | bytes = b"",
        status: str = "",
        failed: bytes = b"",
    ) -> int | StoredCall:
        """Enter a member in a register, at an attempt or as the next one.

        ``failed`` is a member that is known to have failed. Returns the attempt, or the
        call that prevents the entry.
        """
        while True:
            name, *found = await self._step(
                key, b"enter", key.encode(), member, attempt, status, failed
            )

            if name == b"entered":
                return int(found[0])

            try:
                other = await self._holder_of(key, found[0], found[1])
            except StoreFailure as exc:
                raise not_sent(exc) from exc

            if other is None:
                continue

            is_newer = attempt != b"" and other.attempt >= int(attempt)

            if other.status != "failed" or is_newer:
                return other

            failed = found[0]

    async def _confirm(self, member: bytes, attempt: int) -> tuple[bytes, list[Any]]:
        """Take the last step of a member's claim; return a word, and the call.

        For a void member the word is one of `_NO_CALL`, and there is no call.
        """
        try:
            thread, call_id, token = member.split(b"\0")
            thread_id = thread.decode()
        except ValueError as exc:
            text = member.decode(errors="backslashreplace")
            raise CorruptThread("?", repr(text), "not a member") from exc

        arguments = (thread, call_id, token, attempt)
        word, *found = await self._step(thread_id, b"confirm", *arguments, once=False)
        return word, found

    async def _holder_of(
        self, key: str, member: bytes, attempt: int
    ) -> StoredCall | None:
        """Return a member's call; if it is void, remove it and return ``None``."""
        word, found = await self._confirm(member, attempt)

        if word in _NO_CALL:
            await self._step(key, b"release", key.encode(), member, once=False)
            return None

        return decode_call(*found)

    # Deleting and moving

    async def _erase(self, write: Erase) -> Outcome:
        _, _, *arguments = operation(write)
        word, *freed = await self._step(write.thread_id, b"erase", *arguments)

        if word == b"freed":
            # If a member stays in its register, the key's next caller removes it.
            with suppress(StoreFailure, TimeoutError):
                async with asyncio.timeout(1):
                    await self._release(freed)

        return None

    async def _release(self, members: Sequence[Sequence[bytes]]) -> None:
        """Remove members, each with its key, from their registers."""
        await self._run(
            [
                (self._layout.shard_of(key.decode()), [words(b"release", key, member)])
                for key, member in members
            ],
            once=True,
        )

    def _new_token(self) -> bytes:
        return secrets.token_hex(8).encode()

    async def _reserve(self, write: Restore, token: bytes) -> Outcome:
        thread = write.thread_id.encode()
        word, *found = await self._step(write.thread_id, b"begin", thread, token)

        if word == b"conflict":
            return Conflict(found[0])

        entered: dict[bytes, bytes] = {}
        members = zip(_members(write, token), write.calls, strict=True)

        # In the order of attempts: each entry names the failed member before it.
        for (key, member), call in sorted(members, key=lambda one: one[1].attempt):
            place = (call.attempt, call.status, entered.get(key, b""))
            other = await self._enter(key.decode(), member, *place)
            entered[key] = member

            if isinstance(other, StoredCall):
                newest = await self.holder(call.idempotency_key) or other

                # The thread itself claimed the key after the restore began: retry.
                if newest.thread_id == write.thread_id:
                    return StoreFailure("not sent", "another writer began the thread")

                return KeyHeld(call.idempotency_key, newest.thread_id)

        return None

    async def _undo_restore(self, write: Restore, token: bytes, copy: bytes) -> None:
        thread = write.thread_id
        # No call is prepared with this token, so the step only removes the mark.
        await self._step(thread, b"confirm", thread.encode(), b"", token, 0)
        await self._release(_members(write, token))
        await super()._undo_restore(write, token, copy)


def _members(write: Restore, token: bytes) -> list[tuple[bytes, bytes]]:
    """Return each call of a restored thread as a key and a member of its register."""
    thread = write.thread_id.encode()
    return [
        (
            call.idempotency_key.encode(),
            b"\0".join((thread, call.call_id.encode(), token)),
        )
        for call in write.calls
    ]
