"""Random sequences of operations give the same answers as the in-memory store.

A Hypothesis state machine drives the store and an in-memory reference side by side and
compares every answer. On a failure it shrinks the sequence to the shortest script that
still shows the difference.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, ClassVar

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
from conformance.history.script import Script, Step, shortened
from conformance.operations import LATER
from cpkit import (
    ErasesCalls,
    ErasesThreads,
    KeepsReceipts,
    ListsThreads,
    MovesThreads,
    ReadsRanges,
    ToolCall,
    TrimsThreads,
)

EXAMPLES, STEPS = 100, 25

SHRINKING = 6.0
"""Seconds that Hypothesis has to shrink a script, and `shortened` again."""

KEYS = ["k", "l"]

_texts = st.text(st.characters(), max_size=5)  # with lone surrogates

_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner),
    max_leaves=5,
)
_values = _json | st.sampled_from([float("nan"), b"x", {1: 2}])
_objects = st.dictionaries(_texts, _values, max_size=3)
_threads = st.sampled_from(["a", "A"])
_keys = st.sampled_from(KEYS)
_calls = st.sampled_from(["1", "2", "3"])
_args = st.sampled_from([{"n": 1}, {"n": 1.0}, {"n": True}, {"a": 1, "b": 2}])
# Often two keys of the same thread: a random object is empty, or has other keys.
_extras = st.dictionaries(st.sampled_from("ab"), _values, min_size=1) | _objects
_bounds = st.none() | st.integers(-6, 6)


class _Enough(BaseException):
    """Ends the shrinking. Hypothesis would try to shrink an ``Exception`` too."""


class _Bench:
    """Runs the scripts of one run against the store."""

    def __init__(self, case: Case, runner: asyncio.Runner) -> None:
        self._case = case
        self._runner = runner
        self._handle: Any = case.open()
        self.store: Store = self.run(self._handle.__aenter__())
        self.reopens = case.has_handles()
        self.shortest: list[Step] | None = None
        self.until = 0.0

    def run(self, work: Awaitable[Any]) -> Any:
        async def run() -> Any:
            return await work

        return self._runner.run(run())

    def begin(self) -> Script:
        return Script(self._case.id("m"), self._get)

    def close(self) -> None:
        self.run(self._handle.__aexit__(None, None, None))

    async def _get(self, reopened: bool) -> Store:
        if reopened:
            await self._handle.__aexit__(None, None, None)
            self._handle = self._case.open()
            self.store = await self._handle.__aenter__()

        return self.store


class _Machine(RuleBasedStateMachine):
    """One random script."""

    bench: ClassVar[_Bench]

    def __init__(self) -> None:
        super().__init__()
        self.script = self.bench.begin()
        self.bench.run(self.script.open())
        self.may_reopen = self.bench.reopens

    def teardown(self) -> None:
        self.bench.run(self.script.close())

    @rule(
        thread=_threads,
        messages=st.lists(_objects, max_size=3),
        expected_version=st.none() | st.integers(0, 6),
        extra=st.none() | _extras,
    )
    def append(
        self,
        thread: str,
        messages: list[Any],
        expected_version: int | None,
        extra: dict[str, Any] | None,
    ) -> None:
        options = {"expected_version": expected_version, "extra": extra}
        given = {name: value for name, value in options.items() if value is not None}
        self.do("append", thread, messages, **given)
        self.do("load", thread)

    @rule(thread=_threads, extra=_extras)
    def save_extra(self, thread: str, extra: dict[str, Any]) -> None:
        self.do("save_extra", thread, extra)
        self.do("load", thread)

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
        self.do("record_issued", thread, ToolCall(call_id, tool, args, key))
        self.do("load", thread)

    @rule(thread=_threads, call_id=_calls, result=_values, success=st.booleans())
    def record_result(
        self, thread: str, call_id: str, result: Any, success: bool
    ) -> None:
        self.do("record_result", thread, call_id, result, success=success)
        self.do("load", thread)

    @rule(thread=_threads, call_id=_calls, key=_keys, success=st.booleans())
    def make_a_call(self, thread: str, call_id: str, key: str, success: bool) -> None:
        """Claim and resolve: a common case that is rare among random steps."""
        self.record_issued(thread, call_id, key, "pay", {"n": 1})
        self.record_result(thread, call_id, key, success)

    @rule(key=_keys)
    def find(self, key: str) -> None:
        self.do("find_completed", key)

        if isinstance(self.bench.store, KeepsReceipts):
            self.do("find_call", key)

    @precondition(lambda self: isinstance(self.bench.store, ReadsRanges))
    @rule(thread=_threads, start=st.integers(-6, 6), stop=_bounds)
    def read(self, thread: str, start: int, stop: int | None) -> None:
        self.do("read", thread, start, stop)
        self.do("load_range", thread, start, stop)

    @precondition(lambda self: isinstance(self.bench.store, ListsThreads))
    @rule(prefix=st.sampled_from(["", "a", "A", "ab"]), erased=st.booleans())
    def list_threads(self, prefix: str, erased: bool) -> None:
        self.do("list_threads", prefix=prefix, erased=erased)

    @precondition(lambda self: isinstance(self.bench.store, KeepsReceipts))
    @rule(thread=_threads)
    def list_calls(self, thread: str) -> None:
        self.do("list_calls", thread)

    @precondition(lambda self: isinstance(self.bench.store, ErasesThreads))
    @rule(
        thread=_threads,
        expected_version=st.none() | st.integers(0, 3),
        forget_keys=st.booleans(),
    )
    def delete_thread(
        self, thread: str, expected_version: int | None, forget_keys: bool
    ) -> None:
        fence = (
            {} if expected_version is None else {"expected_version": expected_version}
        )
        self.do("delete_thread", thread, **fence, forget_keys=forget_keys)
        self.do("load", thread)

        for key in KEYS:
            self.do("find_completed", key)

    @precondition(lambda self: isinstance(self.bench.store, TrimsThreads))
    @rule(
        thread=_threads,
        before=st.integers(0, 6),
        expected_version=st.none() | st.integers(0, 6),
    )
    def trim(self, thread: str, before: int, expected_version: int | None) -> None:
        self.do("trim", thread, before, expected_version=expected_version)
        self.do("load", thread)

    @precondition(lambda self: isinstance(self.bench.store, ErasesCalls))
    @rule(thread=_threads, expected_version=st.none() | st.integers(0, 3))
    def erase_calls(self, thread: str, expected_version: int | None) -> None:
        self.do("erase_calls", thread, LATER, expected_version=expected_version)

        for key in KEYS:
            self.do("find_completed", key)

    @precondition(lambda self: isinstance(self.bench.store, MovesThreads))
    @rule(thread=_threads)
    def dump_thread(self, thread: str) -> None:
        self.do("dump_thread", thread)

    @precondition(
        lambda self: (
            isinstance(self.bench.store, MovesThreads)
            and isinstance(self.bench.store, ErasesThreads)
        )
    )
    @rule(thread=_threads)
    def move(self, thread: str) -> None:
        self.do("move", thread)
        self.do("load", thread)

        for key in KEYS:
            self.do("find_completed", key)

    @precondition(lambda self: self.may_reopen and len(self.script.steps) > 8)
    @rule()
    def reopen(self) -> None:
        self.may_reopen = False  # once in a script, because opening can be slow
        self.do("reopen")

    def do(self, method: str, *args: Any, **options: Any) -> None:
        """Do a step; on a difference fail, or end the shrinking when time is up."""
        if self.bench.run(self.script.do(Step(method, args, options))):
            return

        bench, steps = self.bench, self.script.steps

        if bench.shortest is None or len(str(steps)) < len(str(bench.shortest)):
            bench.shortest = steps

        bench.until = bench.until or time.monotonic() + SHRINKING

        if time.monotonic() > bench.until:
            raise _Enough

        raise self.script.failure()


@clause("model.agrees-with-reference", deadline=50)
def agrees_with_reference(case: Case) -> None:
    """Any sequence of operations gives the same answers as the in-memory store."""
    with asyncio.Runner() as runner:
        opened = _Bench(case, runner)

        class Machine(_Machine):
            bench = opened

        try:
            _drive(case, Machine)
        finally:
            opened.close()


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
    bench = machine.bench

    try:
        run_state_machine_as_test(
            hypothesis.seed(case.seed)(machine), settings=settings
        )
    except (_Enough, AssertionError):
        if bench.shortest is None:
            raise

    if bench.shortest is not None:
        until = time.monotonic() + SHRINKING
        raise bench.run(
            shortened(bench.shortest, bench.begin, lambda: time.monotonic() > until)
        )
