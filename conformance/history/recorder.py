"""A handle that records every operation as an `Op`, for the models."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from conformance.case import Store
from conformance.history.op import Op
from conformance.sample_dumps import made_dump
from cpkit import (
    BackendUnavailable,
    CallRecord,
    KeepsReceipts,
    MovesThreads,
    ReadsRanges,
    ToolCall,
    TrimsThreads,
    UnknownCall,
    VersionConflict,
)

__all__ = ["Recorder"]


class Recorder:
    """One client of a store, and the history of what it did.

    Messages are ``{"token": ...}``. An operation that is cancelled, or whose answer is
    lost, has an unknown outcome. ``last`` is the last answer for each thread or key. If
    a ``sink`` is given, it is called twice for each operation, and the operation is not
    kept: at the start with an unknown outcome, and at the end (see `merged`).
    """

    def __init__(
        self, cp: Store, client: str, sink: Callable[[Op], None] | None = None
    ) -> None:
        self.cp = cp
        self.client = client
        self.history: list[Op] = []
        self.last: dict[str, tuple[Any, ...]] = {}
        self.keeps_receipts = isinstance(cp, KeepsReceipts)
        self.moves_threads = isinstance(cp, MovesThreads)
        self.reads_ranges = isinstance(cp, ReadsRanges)
        self.trims_threads = isinstance(cp, TrimsThreads)
        self._sink = sink

    async def append(
        self,
        thread: str,
        tokens: Sequence[str],
        expected: int | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        async def run() -> tuple[Any, ...]:
            try:
                version = await self.cp.append(
                    thread,
                    [{"token": token} for token in tokens],
                    expected_version=expected,
                    extra=extra,
                )
            except VersionConflict as exc:
                return "conflict", exc.actual

            return "version", version

        items = tuple((extra or {}).items())
        await self._record(thread, "append", (tuple(tokens), expected, items), run)

    async def save_extra(self, thread: str, extra: Mapping[str, Any]) -> None:
        async def run() -> tuple[Any, ...]:
            await self.cp.save_extra(thread, extra)
            return ("done",)

        await self._record(thread, "save_extra", tuple(extra.items()), run)

    async def load(self, thread: str) -> None:
        async def run() -> tuple[Any, ...]:
            loaded = await self.cp.load(thread)

            if loaded is None:
                return ("nothing",)

            tokens = _tokens(loaded.messages, loaded.first)
            return "loaded", tokens, _items(loaded.extra)

        await self._record(thread, "load", (), run)

    async def read(self, thread: str, start: int, stop: int | None) -> None:
        async def run() -> tuple[Any, ...]:
            return "read", _tokens(await self.cp.read(thread, start, stop))

        await self._record(thread, "read", (start, stop), run)

    async def load_range(self, thread: str, start: int, stop: int | None) -> None:
        async def run() -> tuple[Any, ...]:
            loaded = await self.cp.load_range(thread, start, stop)

            if loaded is None:
                return ("nothing",)

            items = _items(loaded.extra)
            return "part", _tokens(loaded.messages), items, loaded.version

        await self._record(thread, "load_range", (start, stop), run)

    async def delete_thread(self, thread: str, expected: int | None = None) -> None:
        async def run() -> tuple[Any, ...]:
            try:
                await self.cp.delete_thread(thread, expected_version=expected)
            except VersionConflict as exc:
                return "conflict", exc.actual

            return ("deleted",)

        await self._record(thread, "delete_thread", (expected,), run)

    async def trim(self, thread: str, before: int, expected: int | None = None) -> None:
        async def run() -> tuple[Any, ...]:
            try:
                removed = await self.cp.trim(thread, before, expected_version=expected)
            except VersionConflict as exc:
                return "conflict", exc.actual

            return "trimmed", removed

        await self._record(thread, "trim", (before, expected), run)

    async def dump_thread(self, thread: str) -> None:
        async def run() -> tuple[Any, ...]:
            dump = await self.cp.dump_thread(thread)

            if dump is None:
                return ("nothing",)

            return "loaded", _tokens(dump.messages, dump.first), _items(dump.extra)

        await self._record(thread, "dump_thread", (), run)

    async def restore_thread(
        self, thread: str, tokens: Sequence[str], extra: Mapping[str, str]
    ) -> None:
        messages = [{"token": token} for token in tokens]
        dump = made_dump(thread, messages=messages, extra=extra)

        async def run() -> tuple[Any, ...]:
            try:
                await self.cp.restore_thread(dump)
            except VersionConflict as exc:
                return "conflict", exc.actual

            return ("restored",)

        args = (tuple(tokens), _items(extra))
        await self._record(thread, "restore_thread", args, run)

    async def record_issued(self, thread: str, call_id: str, key: str) -> bool:
        """Claim, and return whether the claim succeeded."""
        call = ToolCall(call_id, "pay", {"call": call_id}, key)

        async def run() -> tuple[Any, ...]:
            record = await self.cp.record_issued(thread, call)
            return ("claimed",) if record is None else _answer(record)

        return await self._record(key, "record_issued", (call_id,), run) == ("claimed",)

    async def record_result(
        self, thread: str, call_id: str, key: str, result: str, *, success: bool
    ) -> None:
        async def run() -> tuple[Any, ...]:
            try:
                return _answer(
                    await self.cp.record_result(
                        thread, call_id, result, success=success
                    )
                )
            except UnknownCall:
                return ("unknown call",)

        status = "completed" if success else "failed"
        await self._record(key, "record_result", (call_id, status, result), run)

    async def find_completed(self, key: str) -> None:
        async def run() -> tuple[Any, ...]:
            record = await self.cp.find_completed(key)
            return ("nothing",) if record is None else _answer(record)

        await self._record(key, "find_completed", (), run)

    async def find_call(self, key: str) -> None:
        async def run() -> tuple[Any, ...]:
            record = await self.cp.find_call(key)
            return ("nothing",) if record is None else _answer(record)

        await self._record(key, "find_call", (), run)

    async def delete_calls(
        self, thread: str, client: str, keys: Sequence[str], *, forget_keys: bool
    ) -> None:
        """Delete a client's thread: an operation on each key that it may have used."""

        async def run() -> tuple[Any, ...]:
            await self.cp.delete_thread(thread, forget_keys=forget_keys)
            return ("deleted",)

        await self._record_all(keys, "delete_thread", (client, forget_keys), run)

    async def _record(
        self,
        subject: str,
        kind: str,
        args: tuple[Any, ...],
        run: Callable[[], Awaitable[tuple[Any, ...]]],
    ) -> tuple[Any, ...]:
        return await self._record_all([subject], kind, args, run)

    async def _record_all(
        self,
        subjects: Sequence[str],
        kind: str,
        args: tuple[Any, ...],
        run: Callable[[], Awaitable[tuple[Any, ...]]],
    ) -> tuple[Any, ...]:
        start = time.monotonic_ns()
        ops = [
            Op(self.client, subject, kind, args, None, start, None)
            for subject in subjects
        ]

        if self._sink is not None:
            for op in ops:
                self._sink(op)

        try:
            out = await run()
        except BackendUnavailable as exc:
            # An operation that certainly did not run is not part of the history.
            if exc.maybe_applied:
                self.history += ops

            raise
        except BaseException:
            self.history += ops
            raise

        end = time.monotonic_ns()

        for op in ops:
            self.last[op.subject] = out
            (self._sink or self.history.append)(replace(op, out=out, end=end))

        return out


def _tokens(messages: Sequence[Any], first: int = 0) -> tuple[str | None, ...]:
    """Return the tokens behind a ``None`` for each message that was trimmed."""
    return (None,) * first + tuple(message["token"] for message in messages)


def _items(extra: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(extra.items()))


def _answer(record: CallRecord) -> tuple[Any, ...]:
    call = record.call
    return "record", call.call_id, record.status, record.result, record.attempt
