"""Chance against the reference: any sequence of operations gives what memory gives.

A Hypothesis state machine drives the store and an in-memory reference side by side and
compares every answer. On a failure it shrinks the sequence to the shortest script that
still shows the difference.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, cast

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

EXAMPLES, STEPS = 100, 25

SHRINKING = 8.0
"""Seconds, from the first difference; the shortest script found by then is shown."""

KEYS = ["k", "l"]

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
_threads = st.sampled_from(["a", "A"])
_keys = st.sampled_from(KEYS)
_calls = st.sampled_from(["1", "2", "3"])
_args = st.sampled_from([{"n": 1}, {"n": 1.0}, {"n": True}, {"a": 1, "b": 2}])
_bounds = st.none() | st.integers(-6, 6)


class _Enough(BaseException):
    """Ends the shrinking. An ``Exception`` would be one more failure to shrink."""


class _Machine(RuleBasedStateMachine):
    """One sequence of operations, on ids of its own."""

    case: ClassVar[Case]
    runner: ClassVar[asyncio.Runner]
    store: ClassVar[Store]
    reopen_store: ClassVar[Callable[[], Awaitable[Store]]]
    difference: ClassVar[str] = ""
    script: ClassVar[list[str]] = []  # replaced, never changed
    until: ClassVar[float] = 0

    def __init__(self) -> None:
        super().__init__()
        self.token = self.case.id("m")
        self.lines: list[str] = []
        self.may_reopen = not self.case.harness.lacks("handles")
        self.reference = MemoryCheckpointer[Any]()
        self._run(self.reference.__aenter__())

    def teardown(self) -> None:
        self._run(self.reference.aclose())

    @rule(
        thread=_threads,
        messages=st.lists(_objects, max_size=3),
        expected_version=st.none() | st.integers(0, 6),
    )
    def append(
        self, thread: str, messages: list[Any], expected_version: int | None
    ) -> None:
        self._both(
            "append", self._id(thread), messages, expected_version=expected_version
        )
        self.load(thread)

    @rule(thread=_threads, extra=_objects)
    def save_extra(self, thread: str, extra: dict[str, Any]) -> None:
        self._both("save_extra", self._id(thread), extra)
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
        self._both("record_issued", self._id(thread), call)
        self.load(thread)

    @rule(thread=_threads, call_id=_calls, result=_values, success=st.booleans())
    def record_result(
        self, thread: str, call_id: str, result: Any, success: bool
    ) -> None:
        self._both("record_result", self._id(thread), call_id, result, success=success)
        self.load(thread)

    @rule(thread=_threads, call_id=_calls, key=_keys, success=st.booleans())
    def make_a_call(self, thread: str, call_id: str, key: str, success: bool) -> None:
        """Claim and resolve: the common case, which chance alone seldom hits on."""
        self.record_issued(thread, call_id, key, "pay", {"n": 1})
        self.record_result(thread, call_id, key, success)

    @rule(key=_keys)
    def find_completed(self, key: str) -> None:
        self._both("find_completed", self._id(key))

    def load(self, thread: str) -> None:
        self._both("load", self._id(thread))

    @precondition(lambda self: isinstance(self.store, ReadsRanges))
    @rule(thread=_threads, start=st.integers(-6, 6), stop=_bounds)
    def read(self, thread: str, start: int, stop: int | None) -> None:
        self._both("read", self._id(thread), start, stop)

    @precondition(lambda self: isinstance(self.store, ListsThreads))
    @rule(prefix=st.sampled_from(["", "a", "A", "ab"]))
    def list_threads(self, prefix: str) -> None:
        self._both("list_threads", prefix=self._id(prefix))

    @precondition(lambda self: isinstance(self.store, KeepsReceipts))
    @rule(thread=_threads)
    def list_calls(self, thread: str) -> None:
        self._both("list_calls", self._id(thread))

    @precondition(lambda self: isinstance(self.store, KeepsReceipts))
    @rule(key=_keys)
    def find_call(self, key: str) -> None:
        self._both("find_call", self._id(key))

    @precondition(lambda self: isinstance(self.store, ErasesThreads))
    @rule(thread=_threads, forget_keys=st.booleans())
    def delete_thread(self, thread: str, forget_keys: bool) -> None:
        self._both("delete_thread", self._id(thread), forget_keys=forget_keys)
        self.load(thread)

        for key in KEYS:
            self.find_completed(key)

    @precondition(lambda self: self.may_reopen and len(self.lines) > 8)
    @rule()
    def reopen(self) -> None:
        self.may_reopen = False  # once in a script: it can take its time
        self.lines.append("close, and open again")
        type(self).store = self._run(type(self).reopen_store())

    def _id(self, name: str) -> str:
        return f"{self.token}-{name}"

    def _both(self, method: str, *args: Any, **options: Any) -> None:
        expected = self._answer(cast(Store, self.reference), method, args, options)
        seen = self._answer(self.store, method, args, options)
        given = [*map(repr, args), *(f"{k}={v!r}" for k, v in options.items())]
        self.lines.append(f"await cp.{method}({', '.join(given)})")

        if not exactly(seen, expected):
            self._differs(f"expected {expected!r}, seen {seen!r}")

    def _differs(self, difference: str) -> None:
        """Keep the shortest script so far, and fail or call it enough."""
        cls = type(self)

        if not cls.script or len(self.lines) <= len(cls.script):
            cls.script = [line.replace(f"{self.token}-", "") for line in self.lines]
            cls.difference = difference.replace(f"{self.token}-", "")

        cls.until = cls.until or time.monotonic() + SHRINKING

        if time.monotonic() > cls.until:
            raise _Enough

        raise AssertionError(difference)

    def _answer(
        self, cp: Store, method: str, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        try:
            return _told(self._run(getattr(cp, method)(*args, **options)))
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
            _drive(case, Machine)
        finally:
            runner.run(close())


def _drive(case: Case, machine: type[_Machine]) -> None:
    settings = hypothesis.settings(
        database=None,
        deadline=None,
        max_examples=case.times(EXAMPLES),
        print_blob=False,
        report_multiple_bugs=False,
        stateful_step_count=STEPS,
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )

    try:
        run_state_machine_as_test(
            hypothesis.seed(case.seed)(machine), settings=settings
        )
    except (_Enough, AssertionError):
        if not machine.script:
            raise

        script = "\n".join(f"  {line}" for line in machine.script)
        raise AssertionError(
            f"{machine.difference}\nat the end of this script\n{script}"
        ) from None
