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
    """Messages by token, and extra; the state is ``(tokens, extra's items)``.

    ``None`` stands in the place of each message that was trimmed.
    """

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

        if op.kind == "delete_thread":
            (expected,) = op.args

            if expected not in (None, len(tokens)):
                return state, ("conflict", len(tokens))

            return self.initial, ("deleted",)

        if op.kind == "trim":
            before, expected = op.args

            if expected not in (None, len(tokens)):
                return state, ("conflict", len(tokens))

            cut = tokens[:before]
            left = (None,) * len(cut) + tokens[len(cut) :]
            return (left, extra), ("trimmed", len(_left(cut)))

        if op.kind == "restore_thread":
            if state != self.initial:
                return state, ("conflict", len(tokens))

            return op.args, ("restored",)

        if op.kind == "read":
            start, stop = op.args
            return state, ("read", _left(tokens[start:stop]))

        assert op.kind in ("load", "load_range", "dump_thread")

        if state == self.initial:
            return state, ("nothing",)

        if op.kind == "load_range":
            start, stop = op.args
            return state, ("part", _left(tokens[start:stop]), extra, len(tokens))

        return state, ("loaded", tokens, extra)


def _left(tokens: State) -> State:
    return tuple(token for token in tokens if token is not None)


def _merged(extra: State, items: State) -> State:
    if not items:
        return extra

    return tuple(sorted((dict(extra) | dict(items)).items()))


class _Key:
    """The attempts of a key in order: ``(call id, status, result, attempt, erased)``.

    A call id begins with its client, a dot, and each client has one thread.
    """

    initial: State = ()

    def apply(self, state: State, op: Op) -> tuple[State, tuple[Any, ...]]:
        held = state and state[-1][1] != "failed"

        if op.kind == "record_issued":
            (call_id,) = op.args
            known = _position(state, call_id)

            if known is not None:
                return state, _record(state[known])

            if held:
                return state, _record(state[-1])

            attempt = state[-1][3] + 1 if state else 1
            return (*state, (call_id, "issued", None, attempt, False)), ("claimed",)

        if op.kind == "record_result":
            call_id, status, result = op.args
            known = _position(state, call_id)

            if known is None:
                return state, ("unknown call",)

            _, before, _, attempt, erased = state[known]

            if before == "issued":
                done = (call_id, status, None if erased else result, attempt, erased)
                state = (*state[:known], done, *state[known + 1 :])

            return state, _record(state[known])

        if op.kind == "delete_thread":
            return _without(state, *op.args), ("deleted",)

        if op.kind == "find_completed":
            done = held and state[-1][1] == "completed"
            return state, _record(state[-1]) if done else ("nothing",)

        assert op.kind == "find_call"
        return state, _record(state[-1]) if held else ("nothing",)


def _without(state: State, client: str, forget_keys: bool) -> State:
    """Erase or forget the attempts of a client's thread."""
    left = []

    for call in state:
        call_id, status, _, attempt, _ = call

        if not call_id.startswith(f"{client}."):
            left.append(call)
        elif not forget_keys:
            left.append((call_id, status, None, attempt, True))

    return tuple(left)


def _position(state: State, call_id: str) -> int | None:
    return next((i for i, call in enumerate(state) if call[0] == call_id), None)


def _record(call: State) -> tuple[Any, ...]:
    return ("record", *call[:4])


THREAD: Model = _Thread()
KEY: Model = _Key()
