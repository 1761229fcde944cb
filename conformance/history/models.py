"""The contract as two small state machines: a thread, and an idempotency key.

A model returns the next state and the answer of an operation. States are hashable, so
that the search can remember which states it has visited.
"""

from __future__ import annotations

from typing import Any, Protocol

from conformance.history.op import Op

__all__ = ["KEY", "THREAD", "Model"]

State = tuple[Any, ...]


class Model(Protocol):
    """A sequential specification."""

    initial: State

    def apply(self, state: State, op: Op) -> tuple[State, tuple[Any, ...]]:
        """Return the state after an operation, and what it must return."""
        ...


class _Thread:
    """Messages by token, and extra; the state is ``(tokens, extra's items)``."""

    initial: State = ((), ())

    def apply(self, state: State, op: Op) -> tuple[State, tuple[Any, ...]]:
        tokens, extra = state

        if op.kind == "append":
            more, expected, items = op.args

            if expected not in (None, len(tokens)):
                return state, ("conflict", len(tokens))

            tokens += more
            return (tokens, _merged(extra, items)), ("version", len(tokens))

        if op.kind == "save_extra":
            return (tokens, _merged(extra, op.args)), ("done",)

        assert op.kind == "load"

        if state == self.initial:
            return state, ("nothing",)

        return state, ("loaded", tokens, extra)


def _merged(extra: State, items: State) -> State:
    return tuple(sorted((dict(extra) | dict(items)).items()))


class _Key:
    """The attempts of a key, in order; each is ``(call id, status, result)``."""

    initial: State = ()

    def apply(self, state: State, op: Op) -> tuple[State, tuple[Any, ...]]:
        held = state and state[-1][1] != "failed"

        if op.kind == "record_issued":
            (call_id,) = op.args
            known = _position(state, call_id)

            if known is not None:
                return state, _record(state, known)

            if held:
                return state, _record(state, len(state) - 1)

            return (*state, (call_id, "issued", None)), ("claimed",)

        if op.kind == "record_result":
            call_id, status, result = op.args
            known = _position(state, call_id)

            if known is None:
                return state, ("unknown call",)

            if state[known][1] == "issued":
                done = (call_id, status, result)
                state = (*state[:known], done, *state[known + 1 :])

            return state, _record(state, known)

        last = len(state) - 1

        if op.kind == "find_completed":
            done = held and state[last][1] == "completed"
            return state, _record(state, last) if done else ("nothing",)

        assert op.kind == "find_call"
        return state, _record(state, last) if held else ("nothing",)


def _position(state: State, call_id: str) -> int | None:
    return next((i for i, call in enumerate(state) if call[0] == call_id), None)


def _record(state: State, position: int) -> tuple[Any, ...]:
    return ("record", *state[position], position + 1)


THREAD: Model = _Thread()
KEY: Model = _Key()
