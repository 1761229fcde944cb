"""Steps of one slot each: calls of ``operations.lua`` on the nodes of a cluster."""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from redis.exceptions import NoScriptError

from cpkit.driver import Outcome, StoreFailure
from cpkit_redis.errors import failure, refusal
from cpkit_redis.nodes import Nodes
from cpkit_redis.operations import SCRIPT, SHA, outcome
from cpkit_redis.schema import KINDS, slot_of

__all__ = ["LISTS", "Steps", "new_token", "not_sent"]

LISTS = 64
"""Lists of threads; part of the stored format."""


class Steps:
    """Runs operations of the script, each with all keys of one slot."""

    def __init__(self, nodes: Nodes, prefix: str) -> None:
        self._nodes = nodes
        self._prefix = prefix
        self._base = f"{prefix}:".encode()

    def thread_keys(self, thread_id: str) -> list[bytes]:
        slot = slot_of(self._prefix, thread_id)
        return [slot, *(slot + kind for kind in KINDS), slot + b"w"]

    def register_keys(self, key: bytes) -> list[bytes]:
        slot = slot_of(self._prefix, key.decode())
        return [slot, slot + b"k", slot + b"s"]

    def list_keys(self, thread: bytes) -> list[bytes]:
        slot = self._base + b"{threads-%02d}:" % (zlib.crc32(thread) % LISTS)
        return [slot, slot + b"l", slot + b"n"]

    def call(
        self,
        keys: Sequence[bytes],
        operations: Sequence[Sequence[Any]],
        token: bytes = b"",
        mark: bytes = b"",
    ) -> tuple[bytes, list[Any]]:
        """Return a call of the script for `_run_each`: a key, and its arguments."""
        rest = [word for one in operations for word in one]
        token = token or new_token()
        return keys[0], [len(keys), *keys, b"", token, mark, *rest]

    async def each(
        self, calls: Sequence[tuple[bytes, list[Any]]], *, writes: bool
    ) -> list[Any]:
        """Return the answers to each call, or its ``StoreFailure``."""
        answers = await self._nodes.ask_each(
            [(key, ("EVALSHA", SHA, *rest)) for key, rest in calls], writes=writes
        )
        unknown = [
            at for at, one in enumerate(answers) if isinstance(one, NoScriptError)
        ]

        if unknown:
            again = [(calls[at][0], ("EVAL", SCRIPT, *calls[at][1])) for at in unknown]
            found = await self._nodes.ask_each(again, writes=writes)

            for at, answer in zip(unknown, found, strict=True):
                answers[at] = answer

        return [failure(one) if isinstance(one, Exception) else one for one in answers]

    async def step(
        self,
        keys: Sequence[bytes],
        *words: Any,
        token: bytes = b"",
        mark: bytes = b"",
        writes: bool = True,
    ) -> list[Any]:
        """Return the answer to one operation; raise its failure.

        ``writes`` is false where it does no harm to repeat the operation.
        """
        [answer] = await self.each(
            [self.call(keys, [words], token, mark)], writes=writes
        )

        if isinstance(answer, StoreFailure):
            raise answer

        self.check(answer[0], keys[0], "?")
        return answer[0]  # type: ignore[no-any-return]  # redis-py has no type for it

    def check(self, answer: list[Any], where: bytes, thread_id: str) -> None:
        if answer[0] == b"failed":
            raise refusal(answer[1].decode(errors="replace"), thread_id, where)

    async def attempt(self, calls: Sequence[tuple[bytes, list[Any]]]) -> None:
        """Make calls that the next caller makes up for where they fail."""
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await self.each(calls, writes=True)

    def outcome(self, thread_id: str, answer: Any) -> Outcome:
        if isinstance(answer, StoreFailure):
            return answer

        where = slot_of(self._prefix, thread_id)
        return outcome(answer, thread_id, where)  # type: ignore[no-any-return]

    async def listed(
        self, thread_id: str, step: Callable[[bytes], Awaitable[Any]]
    ) -> Any:
        """Take a step; enlist the thread and take it again where it is a new one."""
        mark = b""

        while True:
            answer = await step(mark)

            if answer[0] != b"unlisted":
                return answer

            mark = answer[1]
            await self.enlist(thread_id)

    async def enlist(self, thread_id: str) -> None:
        [answer] = await self.each([self.enlisting(thread_id)], writes=True)

        if isinstance(answer, StoreFailure):
            raise not_sent(answer)

        self.check(answer[0], self.list_keys(thread_id.encode())[0], thread_id)

    def enlisting(self, thread_id: str) -> Any:
        thread = thread_id.encode()
        return self.call(self.list_keys(thread), [(b"enlist", thread)])


def new_token() -> bytes:
    return secrets.token_hex(8).encode()


def not_sent(failed: StoreFailure) -> StoreFailure:
    """Return the failure of a step that changes nothing that can be read."""
    if failed.fate == "rejected":
        return failed

    return StoreFailure("not sent", failed.reason)
