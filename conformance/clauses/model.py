"""Chance against the reference: any sequence of operations gives what memory gives.

A Hypothesis state machine drives the store and an in-memory reference side by side and
compares every answer. On a failure it shrinks the sequence to the shortest script that
still shows the difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from conformance.case import Case, Store
from conformance.clause import clause
from conformance.samples import exactly
from cpkit import (
    CallRecord,
    CheckpointData,
    CheckpointerError,
    ErasesThreads,
    KeepsReceipts,
    ListsThreads,
    MemoryCheckpointer,
    ReadsRanges,
    ToolCall,
    VersionConflict,
)

EXAMPLES, STEPS = 40, 20

_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner)
    ),
    max_leaves=5,
)
_values = _json | st.sampled_from([float("nan"), "\ud800", b"x", {1: 2}])
_objects = st.dictionaries(st.text(max_size=4), _values, max_size=3)
_threads = st.sampled_from(["a", "b", "A"])
_keys = st.sampled_from(["k", "l"])
_calls = st.sampled_from(["1", "2", "3", "4"])
_args = st.sampled_from([{"n": 1}, {"n": 1.0}, {"n": True}, {"a": 1, "b": 2}])
_bounds = st.none() | st.integers(-6, 6)


class _Machine(RuleBasedStateMachine):
    """One sequence of operations, on ids of its own."""

    case: Case
    runner: asyncio.Runner
    store: Store
    reopen_store: Callable[[], Awaitable[Store]]

    def __init__(self) -> None:
        super().__init__()
        self.token = self.case.id("m")
        self.reference = cast(Store, MemoryCheckpointer[Any]())
        self._run(self.reference.__aenter__())  # type: ignore[attr-defined]  # a Driver

    def teardown(self) -> None:
        self._run(self.reference.aclose())  # type: ignore[attr-defined]  # a Driver

    @rule(
        thread=_threads,
        messages=st.lists(_objects, max_size=3),
        expected_version=st.none() | st.integers(0, 6),
    )
    def append(
        self, thread: str, messages: list[Any], expected_version: int | None
    ) -> None:
        self._both(
            lambda cp: cp.append(
                self._id(thread), messages, expected_version=expected_version
            )
        )
        self.load(thread)

    @rule(thread=_threads, extra=_objects)
    def save_extra(self, thread: str, extra: dict[str, Any]) -> None:
        self._both(lambda cp: cp.save_extra(self._id(thread), extra))
        self.load(thread)

    @rule(
        thread=_threads,
        call_id=_calls,
        key=_keys,
        tool=st.sampled_from(["pay", "ship"]),
        args=_args,
    )
    def record_issued(
        self, thread: str, call_id: str, key: str, tool: str, args: dict[str, Any]
    ) -> None:
        call = ToolCall(call_id, tool, args, self._id(key))
        self._both(lambda cp: cp.record_issued(self._id(thread), call))
        self.load(thread)

    @rule(thread=_threads, call_id=_calls, result=_values, success=st.booleans())
    def record_result(
        self, thread: str, call_id: str, result: Any, success: bool
    ) -> None:
        self._both(
            lambda cp: cp.record_result(
                self._id(thread), call_id, result, success=success
            )
        )
        self.load(thread)

    @rule(key=_keys)
    def find_completed(self, key: str) -> None:
        self._both(lambda cp: cp.find_completed(self._id(key)))

    @rule(thread=_threads)
    def load(self, thread: str) -> None:
        self._both(lambda cp: cp.load(self._id(thread)))

    @precondition(lambda self: isinstance(self.store, ReadsRanges))
    @rule(thread=_threads, start=st.integers(-6, 6), stop=_bounds)
    def read(self, thread: str, start: int, stop: int | None) -> None:
        self._both(lambda cp: cp.read(self._id(thread), start, stop))

    @precondition(lambda self: isinstance(self.store, ListsThreads))
    @rule(prefix=st.sampled_from(["", "a", "A", "ab"]))
    def list_threads(self, prefix: str) -> None:
        self._both(lambda cp: cp.list_threads(prefix=self._id(prefix)))

    @precondition(lambda self: isinstance(self.store, KeepsReceipts))
    @rule(thread=_threads)
    def list_calls(self, thread: str) -> None:
        self._both(lambda cp: cp.list_calls(self._id(thread)))

    @precondition(lambda self: isinstance(self.store, KeepsReceipts))
    @rule(key=_keys)
    def find_call(self, key: str) -> None:
        self._both(lambda cp: cp.find_call(self._id(key)))

    @precondition(lambda self: isinstance(self.store, ErasesThreads))
    @rule(thread=_threads, forget_keys=st.booleans())
    def delete_thread(self, thread: str, forget_keys: bool) -> None:
        self._both(
            lambda cp: cp.delete_thread(self._id(thread), forget_keys=forget_keys)
        )
        self.load(thread)

    @precondition(lambda self: not self.case.harness.lacks("handles"))
    @rule()
    def reopen(self) -> None:
        type(self).store = self._run(type(self).reopen_store())

    def _id(self, name: str) -> str:
        return f"{self.token}-{name}"

    def _both(self, use: Callable[[Store], Awaitable[Any]]) -> None:
        expected = self._answer(use, self.reference)
        seen = self._answer(use, self.store)
        assert exactly(seen, expected), f"expected {expected!r}, seen {seen!r}"

    def _answer(self, use: Callable[[Store], Awaitable[Any]], cp: Store) -> Any:
        try:
            return _told(self._run(use(cp)))
        except VersionConflict as exc:
            return ["VersionConflict", exc.expected, exc.actual]
        except CheckpointerError as exc:
            return [type(exc).__name__]

    def _run(self, work: Awaitable[Any]) -> Any:
        async def run() -> Any:
            return await work

        return self.runner.run(run())


def _told(value: Any) -> Any:
    """Return an answer without its times, and without the order of extra's keys."""
    if isinstance(value, CheckpointData):
        extra = sorted(value.extra.items())
        return [value.messages, [list(item) for item in extra], _told(value.pending)]

    if isinstance(value, CallRecord):
        call = value.call
        return [
            value.thread_id,
            [call.call_id, call.tool_name, dict(call.args), call.idempotency_key],
            [value.status, value.attempt, value.result, value.erased],
            value.resolved_at is not None,
        ]

    if isinstance(value, list):
        return [
            [one.thread_id, one.version] if hasattr(one, "updated_at") else _told(one)
            for one in value
        ]

    return value


@clause("model.agrees-with-reference", deadline=120)
def agrees_with_reference(case: Case) -> None:
    """Any sequence of operations answers as the in-memory reference does."""
    with asyncio.Runner() as runner:
        handle: Any = None

        async def close() -> None:
            if handle is not None:
                await handle.__aexit__(None, None, None)

        async def reopen() -> Store:
            nonlocal handle
            await close()
            handle = case.open()
            opened: Store = await handle.__aenter__()
            return opened

        class Machine(_Machine):
            pass

        Machine.case, Machine.runner = case, runner
        Machine.reopen_store = staticmethod(reopen)
        Machine.store = runner.run(reopen())

        try:
            run_state_machine_as_test(
                hypothesis.seed(case.seed)(Machine),
                settings=hypothesis.settings(
                    database=None,
                    deadline=None,
                    max_examples=case.times(EXAMPLES),
                    print_blob=False,
                    report_multiple_bugs=False,
                    stateful_step_count=STEPS,
                    suppress_health_check=list(hypothesis.HealthCheck),
                ),
            )
        finally:
            runner.run(close())
