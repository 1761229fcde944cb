"""Claims in a cluster: three steps over two slots, and who holds a key.

1. *Prepare* (thread): write the call and a new token into ``w``. An attempt of the
   same call that did not get further loses its token.
2. *Grant* (register): enter the member as the next attempt, unless the newest
   member has not failed.
3. *Confirm* (thread): make the prepared call a record, if it has the token still.
   Only then the caller is told that it holds the key.

A caller that finds another member in the register confirms that member's call
itself (step 3), and answers with its record. Where the thread has no call with the
token, the member is void: the caller removes it and tries to grant again.

Two callers never hold one key. The register has one newest member at a time, so
two holders would need a member that was replaced as void and is confirmed later. A
member is entered after its token was written in its thread, and no token is written
twice. So a token that is missing there is missing for ever: its confirmation fails.

If the process dies after step 1, the prepared call is not on record and holds
nothing; the same call, repeated, replaces it. After step 2, the next caller of the
key confirms the call, or removes the member if the same call was prepared again.
After step 3 the call is on record. A lost answer is the same as such a death.

A *result* is recorded in the thread, then noted in the register. A caller that finds
the note missing reads the record and adds it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from cpkit.driver import Claim, KeyHeld, Outcome, Resolve, StoredCall, StoreFailure
from cpkit.errors import CorruptThread
from cpkit_redis.operations import operation
from cpkit_redis.schema import decode_call
from cpkit_redis.server import cancellation
from cpkit_redis.steps import Steps, new_token, not_sent

__all__ = ["Claims"]

# Seconds between attempts to confirm a claim that was granted.
_PAUSE = 0.05


class Claims:
    """The registers of keys, and the calls of threads that are in them."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    async def claim(self, write: Claim) -> Outcome:
        thread, call_id, key = (
            one.encode()
            for one in (
                write.thread_id,
                write.call.call_id,
                write.call.idempotency_key,
            )
        )
        token = new_token()
        register = self._steps.register_keys(key)

        try:
            known = await self._prepare(write, token)
        except StoreFailure as exc:
            raise not_sent(exc) from exc

        if known is not None:
            return known

        member = b"\0".join((thread, call_id, token))

        while True:
            word, *found = await self._steps.step(register, b"grant", member)

            if word == b"granted":
                break

            try:
                holder = await self._holder_of(key, found[0], found[1])
            except StoreFailure as exc:
                raise not_sent(exc) from exc

            if holder is not None and holder.status != "failed":
                with suppress(StoreFailure):
                    keys = self._steps.thread_keys(write.thread_id)
                    await self._steps.step(keys, b"withdraw", call_id, token)

                return holder

        is_lost = False
        is_cancelled = cancellation()

        while True:
            try:
                if await self._confirmed(member, found[0]) is not None:
                    return None
            except StoreFailure as exc:
                # The next caller of the key may confirm it, so it may hold. The time
                # limit of the operation ends this.
                if exc.fate == "rejected" or is_cancelled():
                    raise StoreFailure("unknown", exc.reason) from exc

                is_lost = is_lost or exc.fate == "unknown"
                await asyncio.sleep(_PAUSE)
            else:
                raise StoreFailure(
                    "unknown" if is_lost else "not sent",
                    "another writer deleted the thread during the claim",
                )

    async def _prepare(self, write: Claim, token: bytes) -> Outcome:
        """Take the first step; return the call that is on record already."""
        _, *arguments = operation([write])
        keys = self._steps.thread_keys(write.thread_id)
        answer = await self._steps.listed(
            write.thread_id,
            lambda mark: self._steps.step(
                keys, b"prepare", *arguments, token=token, mark=mark
            ),
        )
        return self._steps.outcome(write.thread_id, answer)

    async def _confirmed(self, member: bytes, attempt: int) -> list[Any] | None:
        """Take the last step of a member's claim; ``None`` where it is void."""
        try:
            thread, call_id, token = member.split(b"\0")
        except ValueError as exc:
            text = member.decode(errors="backslashreplace")
            raise CorruptThread("?", repr(text), "not a member") from exc

        keys = self._steps.thread_keys(thread.decode())
        words = (b"confirm", thread, call_id, token, attempt)
        answer = await self._steps.step(keys, *words, writes=False)
        return None if answer[0] == b"gone" else answer[1:]

    async def _holder_of(
        self, key: bytes, member: bytes, attempt: int
    ) -> StoredCall | None:
        """Return a member's call, and complete what its caller left undone.

        ``None`` where the member was void; it is removed.
        """
        register = self._steps.register_keys(key)
        found = await self._confirmed(member, attempt)

        if found is None:
            await self._steps.step(register, b"release", member, writes=False)
            return None

        call = decode_call(*found)

        if call.status != "issued":
            await self._steps.step(
                register, b"settle", member, call.status, writes=False
            )

        return call

    async def holder(self, key: str) -> StoredCall | None:
        register = self._steps.register_keys(key.encode())

        while True:
            word, *found = await self._steps.step(register, b"newest", writes=False)

            if word == b"unknown":
                return None

            call = await self._holder_of(key.encode(), found[0], found[1])

            if call is not None:
                return call

    async def resolve(self, write: Resolve) -> Outcome:
        name, thread, *rest = operation([write])
        answer = await self._steps.step(
            self._steps.thread_keys(write.thread_id), name, thread, *rest
        )
        found = self._steps.outcome(write.thread_id, answer)

        if isinstance(found, StoredCall) and found.status != "issued":
            member = b"\0".join((thread, found.call_id.encode(), answer[3][-16:]))
            register = self._steps.register_keys(found.idempotency_key.encode())
            status = found.status.encode()
            await self._steps.attempt(
                [self._steps.call(register, [(b"settle", member, status)])]
            )

        return found

    async def reserve(
        self, key: bytes, member: bytes, call: StoredCall
    ) -> KeyHeld | None:
        """Enter a restored call in its register; return what is in the way."""
        register = self._steps.register_keys(key)
        status = call.status.encode()
        settled = None

        while True:
            word, *found = await self._steps.step(
                register, b"reserve", member, call.attempt, status
            )

            if word == b"done":
                return None

            holder = await self._holder_of(key, found[0], found[1])

            # A register that does not know of a failure yet is asked again.
            if holder is not None:
                if holder.status != "failed" or settled == found[0]:
                    newest, _, _ = found[2].partition(b"\0")
                    return KeyHeld(call.idempotency_key, newest.decode())

                settled = found[0]
