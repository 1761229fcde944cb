"""A sequence of calls on a store and on the in-memory store, and how they differ."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

from conformance.case import Store
from conformance.failure import Failure
from conformance.sample_values import exactly
from cpkit import (
    CallRecord,
    CheckpointData,
    CheckpointerError,
    MemoryCheckpointer,
    ThreadDump,
    ToolCall,
    VersionConflict,
)

__all__ = ["Script", "Step", "shortened"]


class Step(NamedTuple):
    """A call of a method; `Script` replaces the ids in it by fresh ids.

    Two methods are of the script: ``reopen``, and ``move``, which dumps, deletes and
    restores a thread.
    """

    method: str
    args: tuple[Any, ...]
    options: dict[str, Any]

    def __str__(self) -> str:
        if self.method == "reopen":
            return "close the store, and open it again"

        if self.method == "move":
            return f"dump {self.args[0]!r}, delete it with forget_keys, and restore it"

        given = [*map(repr, self.args)]
        given += [f"{name}={value!r}" for name, value in self.options.items()]
        return f"await cp.{self.method}({', '.join(given)})"


class Script:
    """The steps done so far, on ids that start with a fresh token.

    ``expected`` and ``seen`` are the two answers to the first step with a difference.
    ``reopen(True)`` closes and opens the store again; it always returns the store.
    """

    def __init__(self, token: str, reopen: Callable[[bool], Awaitable[Store]]) -> None:
        self.steps: list[Step] = []
        self.expected = self.seen = ""
        self._token = token
        self._reopen = reopen
        self._reference = MemoryCheckpointer[Any]()

    async def open(self) -> None:
        await self._reference.__aenter__()

    async def close(self) -> None:
        await self._reference.aclose()

    async def do(self, step: Step) -> bool:
        """Do a step on both stores, and return whether their answers are equal."""
        self.steps.append(step)
        store = await self._reopen(step.method == "reopen")

        if step.method == "reopen":
            return True

        expected = await self._answer(cast(Store, self._reference), step)
        seen = await self._answer(store, step)

        if exactly(seen, expected):
            return True

        self.expected, self.seen = (
            repr(answer).replace(f"{self._token}-", "") for answer in (expected, seen)
        )
        return False

    def failure(self) -> Failure:
        """Return the difference and the steps that lead to it."""
        return Failure(self.expected, self.seen, "\n".join(map(str, self.steps)))

    async def _answer(self, cp: Store, step: Step) -> Any:
        # Ids are the first positional arguments. The only id by keyword is ``prefix``.
        ids = 0 if step.method == "list_threads" else 1
        args = [self._fresh_id(a) if i < ids else a for i, a in enumerate(step.args)]
        options = {
            k: self._fresh_id(v) if k == "prefix" else v
            for k, v in step.options.items()
        }

        if args and isinstance(args[-1], ToolCall):
            key = self._fresh_id(args[-1].idempotency_key)
            args[-1] = replace(args[-1], idempotency_key=key)

        try:
            if step.method == "move":
                return self._comparable(await _moved(cp, *args))

            return self._comparable(await getattr(cp, step.method)(*args, **options))
        except VersionConflict as exc:
            return ["VersionConflict", exc.expected, exc.actual]
        except CheckpointerError as exc:
            return [type(exc).__name__]

    def _fresh_id(self, name: Any) -> str:
        return f"{self._token}-{name}"

    def _comparable(self, value: Any) -> Any:
        """Return an answer without its times and without the order of extra's keys."""
        if isinstance(value, CheckpointData):
            extra = [list(item) for item in sorted(value.extra.items())]
            pending = self._comparable(value.pending)
            return [value.messages, extra, pending, value.version, value.first]

        if isinstance(value, ThreadDump):
            extra = [list(item) for item in sorted(value.extra.items())]
            calls = self._comparable(list(value.calls))
            messages, is_alive = list(value.messages), value.created_at is not None
            return [messages, extra, calls, is_alive, value.first]

        if isinstance(value, CallRecord):
            call = value.call
            return [
                value.thread_id,
                [call.call_id, call.tool_name, dict(call.args), call.idempotency_key],
                [value.status, value.attempt, value.result, value.erased],
                value.resolved_at is not None,
            ]

        if isinstance(value, list):
            return [self._comparable(one) for one in value]

        if hasattr(value, "updated_at"):
            return [value.thread_id, value.version]

        return value


async def _moved(cp: Store, thread: str) -> ThreadDump | None:
    """Forget a thread and restore it from its dump; return the dump."""
    dump = await cp.dump_thread(thread)

    if dump is not None:
        await cp.delete_thread(thread, forget_keys=True)
        await cp.restore_thread(dump)

    return dump


async def shortened(
    steps: list[Step], begin: Callable[[], Script], enough: Callable[[], bool]
) -> Failure:
    """Leave out steps that are not needed for the difference, and return it.

    ``begin`` makes a script on fresh ids. Stops early when ``enough`` returns true.
    """

    async def replay(some: list[Step]) -> Script | None:
        script = begin()
        await script.open()

        try:
            for step in some:
                if not await script.do(step):
                    return script
        finally:
            await script.close()

        return None

    best = await replay(steps)
    assert best is not None, (
        "the steps gave a difference at first, but not when repeated"
    )

    for i in reversed(range(len(steps))):
        if enough():
            break

        if i < len(best.steps) - 1:
            rest = [*best.steps[:i], *best.steps[i + 1 :]]
            best = await replay(rest) or best

    return best.failure()
