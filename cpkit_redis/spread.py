"""A store over all slots of a Redis Cluster: a write is steps of one slot each.

Each step is one call of ``operations.lua`` with keys of one slot.

Keys
    Threads are as in `cpkit_redis.schema`, with three differences. A record ends with a
    token, 16 letters that no other claim has. ``w`` holds prepared claims (call id ->
    token, key, tool, args), and the field ``begun`` of ``t`` is the mark of a thread
    that is not written yet. The register of a key is ``k``, a sorted set of members
    (thread, call id, token; the score is the attempt), and ``s``: the status of the
    newest member, where it is known to be completed or failed. The list of threads is
    64 lists, ``<prefix>:{threads-00}:l`` and so on; ``n`` numbers their entries.

Writes
    A claim takes three steps over two slots: see `cpkit_redis.claims`.

    The first write of a *new thread* marks the thread as begun, puts it on its list,
    and is made if the mark is still there. A deletion removes the mark, and then the
    list's entry if it has the number that it had before. So no thread is missing on the
    list. An entry without a thread is not shown.

    *Deleting* with ``forget_keys`` removes the calls, which makes their members void,
    and then the members. A *restored* thread is copied, marked as begun, entered in the
    registers with the mark as the token, and renamed if it has the mark still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from cpkit.driver import (
    Append,
    Batching,
    Claim,
    Conflict,
    Erase,
    Merge,
    Outcome,
    Resolve,
    Restore,
    StoredCall,
    StoreFailure,
    Write,
    prefix_end,
)
from cpkit.records import ThreadInfo
from cpkit_redis.claims import Claims
from cpkit_redis.errors import refusal
from cpkit_redis.one_slot import OneSlotStore
from cpkit_redis.operations import (
    grouped,
    operation,
    outcomes_of,
)
from cpkit_redis.restoring import copy_thread
from cpkit_redis.schema import KINDS, decode_thread
from cpkit_redis.steps import LISTS, Steps, new_token, not_sent

__all__ = ["SpreadStore"]

# Threads of a list whose details are read in one go.
_PAGE = 1000

_NO_TOKEN = b"0" * 16


class SpreadStore(OneSlotStore):
    """A store over all slots of a cluster."""

    # Other writes take several steps, and each goes its own way.
    batching = Batching(lanes=2, kinds=(Append, Merge))

    def _connect(self, where: Any, options: Any) -> str:
        address = super()._connect(where, options)
        schema = self._keys_to_create[1]
        self._keys_to_create[0] = self._base + b"{" + schema + b"}rehearsal"
        self._steps = Steps(self._server, self._prefix)
        self._claims = Claims(self._steps)
        return address

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        match batch[0]:
            case Append() | Merge():
                return await self._append(batch)
            case Claim():
                return [await self._claims.claim(batch[0])]
            case Resolve():
                return [await self._claims.resolve(batch[0])]
            case Erase():
                return [await self._erase(batch[0])]
            case Restore():
                return [await self._restore(batch[0])]

    # Appends

    async def _append(self, batch: Sequence[Write]) -> list[Outcome]:
        """Make writes of one slot each; those of one thread in their order."""
        places: dict[str, list[int]] = {}

        for at, write in enumerate(batch):
            places.setdefault(write.thread_id, []).append(at)

        found: dict[str, list[Outcome]] = {one: [] for one in places}
        waiting = {
            thread_id: grouped([batch[at] for at in some], self.limits.max_append)
            for thread_id, some in places.items()
        }
        marks: dict[str, bytes] = {}

        while waiting:
            answers = await self._steps.each(
                [
                    self._steps.call(
                        self._steps.thread_keys(one),
                        [*map(operation, groups)],
                        mark=marks.get(one, b""),
                    )
                    for one, groups in waiting.items()
                ],
                writes=True,
            )
            unlisted: dict[str, list[list[Write]]] = {}

            for (one, groups), answer in zip(waiting.items(), answers, strict=True):
                if isinstance(answer, StoreFailure):
                    answer = [answer] * len(groups)

                for at, (group, said) in enumerate(zip(groups, answer, strict=True)):
                    if not isinstance(said, StoreFailure) and said[0] == b"unlisted":
                        unlisted[one] = groups[at:]
                        marks[one] = said[1]
                        break

                    found[one] += outcomes_of(group, self._steps.outcome(one, said))

            waiting = unlisted
            lists = [self._steps.enlisting(one) for one in waiting]

            for one, answer in zip(
                [*waiting], await self._steps.each(lists, writes=True), strict=True
            ):
                if isinstance(answer, StoreFailure):
                    count = len(places[one]) - len(found[one])
                    found[one] += [not_sent(answer)] * count
                    del waiting[one]

        outcomes: list[Outcome] = [None] * len(batch)

        for one, some in places.items():
            for at, result in zip(some, found[one], strict=True):
                outcomes[at] = result

        return outcomes

    async def holder(self, key: str) -> StoredCall | None:
        return await self._claims.holder(key)

    # Deleting and moving

    async def _erase(self, write: Erase) -> Outcome:
        thread = write.thread_id.encode()
        lists = self._steps.list_keys(thread)

        try:
            [number] = await self._server.ask(lists[0], ("HGET", lists[2], thread))
        except StoreFailure as exc:
            raise not_sent(exc) from exc

        if isinstance(number, Exception):
            raise refusal(number, write.thread_id, lists[2]) from number

        keys = self._steps.thread_keys(write.thread_id)
        name, *arguments = operation([write])
        word, *freed = await self._steps.step(keys, name, *arguments)

        if word == b"freed":
            calls = [
                self._steps.call(
                    self._steps.register_keys(key),
                    [(b"release", b"\0".join((thread, call_id, token)))],
                )
                for key, call_id, token in freed
            ]

            if number is not None:
                calls.append(self._steps.call(lists, [(b"delist", thread, number)]))

            await self._steps.attempt(calls)

        return None

    async def _restore(self, write: Restore) -> Outcome:
        thread = write.thread_id.encode()
        keys = self._steps.thread_keys(write.thread_id)
        token = new_token()
        copy = keys[0] + f"copy-{uuid4().hex}:".encode()
        copies = [copy + kind for kind in KINDS]
        lifetime = int(self.timeouts.operation or 0) + 60
        members: list[tuple[bytes, bytes]] = []
        is_restored = False

        try:
            sizes = await copy_thread(self._server.ask, write, copy, lifetime, token)
            answer = await self._steps.step(keys, b"begin", token=token)

            if answer[0] == b"conflict":
                return Conflict(answer[1])

            await self._steps.enlist(write.thread_id)

            for call in write.calls:
                member = b"\0".join((thread, call.call_id.encode(), token))
                key = call.idempotency_key.encode()
                members.append((key, member))

                if held := await self._claims.reserve(key, member, call):
                    return held

            restore = (b"restore", thread, copy, sizes)
            is_restored = True  # or may be
            answer = await self._steps.step([*keys, *copies], *restore, token=token)
            is_restored = answer[0] == b"done"

            if answer[0] == b"gone":
                raise StoreFailure("not sent", "the restore was overtaken")

            return self._steps.outcome(write.thread_id, answer)
        except StoreFailure as exc:
            if is_restored and exc.fate == "unknown":
                raise

            is_restored = False
            raise not_sent(exc) from exc
        except asyncio.CancelledError as exc:
            if is_restored:
                raise

            raise StoreFailure("not sent", "the restore was interrupted") from exc
        finally:
            if not is_restored:
                await self._undo_restore(thread, token, copies, members)

    async def _undo_restore(
        self,
        thread: bytes,
        token: bytes,
        copies: list[bytes],
        members: list[tuple[bytes, bytes]],
    ) -> None:
        calls = [
            self._steps.call(self._steps.register_keys(key), [(b"release", member)])
            for key, member in members
        ]
        # Where no such call is prepared, this removes the mark.
        keys = self._steps.thread_keys(thread.decode())
        calls.append(self._steps.call(keys, [(b"confirm", thread, b"", token, 0)]))
        await self._steps.attempt(calls)

        with suppress(StoreFailure):
            await self._server.ask(copies[0], ("UNLINK", *copies))

    # The list of threads

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
            ids, is_end = await self._ids(low, high, wanted)
            found += await self._infos(ids[:wanted], erased)

            if is_end and len(ids) <= wanted:
                break

            low = b"(" + ids[:wanted][-1]

        return found

    async def _ids(
        self, low: bytes, high: bytes, wanted: int
    ) -> tuple[list[bytes], bool]:
        """Return the next ids of all lists in order, and whether there are no more."""
        # A list has its share of the page, and a few more as chance has it.
        size = min(wanted, wanted // LISTS + 16)
        keys = [self._base + b"{threads-%02d}:l" % n for n in range(LISTS)]
        pages = await self._server.ask_each(
            [(key, ("ZRANGEBYLEX", key, low, high, "LIMIT", 0, size)) for key in keys]
        )

        for key, page in zip(keys, pages, strict=True):
            if isinstance(page, Exception):
                raise refusal(page, "?", key) from page

        # Behind the end of a full page its list may have more.
        ends = [page[-1] for page in pages if len(page) == size]
        ids = sorted(one for page in pages for one in page)

        if not ends:
            return ids, True

        return [one for one in ids if one <= min(ends)], False

    async def _infos(self, ids: list[bytes], erased: bool) -> list[ThreadInfo]:
        keys = [self._steps.thread_keys(one.decode()) for one in ids]
        answers = await self._steps.each(
            [self._steps.call(some, [(b"info",)]) for some in keys], writes=False
        )
        found = []

        for one, some, answer in zip(ids, keys, answers, strict=True):
            if isinstance(answer, StoreFailure):
                raise answer

            self._steps.check(answer[0], some[0], one.decode())
            _, version, created, updated, first, last = answer[0]

            # A list may have entries of threads that are being deleted or begun.
            if created is not None:
                found.append(decode_thread(one, version, created, updated))
            elif first is not None and erased:
                found.append(decode_thread(one, version, first, last))
            elif version:
                decode_thread(one, version, None, None)

        return found

    def _arguments(self, keys: Sequence[bytes]) -> list[Any]:
        return [len(keys), *keys, b"", _NO_TOKEN, b""]
