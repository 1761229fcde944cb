"""Tools: functions that a model may call, and the registry that runs them once."""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextvars import copy_context
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, Protocol, Unpack, cast, overload

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs, to_jsonable_python

from cpkit.canonical import canonical_json
from cpkit.effects.attempts import Attempts
from cpkit.effects.effect import (
    Effect,
    EffectOptions,
    EffectPlan,
    Handler,
    NoEffect,
    Options,
    check_no_generator,
    copy_json,
    plan_effect,
)
from cpkit.effects.errors import EffectDenied, EffectFailed, EffectTimeout
from cpkit.effects.records import asked_args, effect_of, exception_message
from cpkit.effects.run import RunResult
from cpkit.effects.tracing import log
from cpkit.errors import CheckpointerError, PayloadTooLarge, SerializationError
from cpkit.records import CallRecord, JsonValue

__all__ = [
    "RunsEffects",
    "Tool",
    "ToolOutcome",
    "ToolRegistry",
    "arguments_json",
    "call_function",
    "run_recorded",
    "tool",
]

_ANY: TypeAdapter[Any] = TypeAdapter(Any)
"""Writes each value by its own type."""

_OBJECT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


class Tool:
    """A function that a model may call, with what it does to the world.

    The function is sync or async, and takes its arguments by name. A parameter that is
    annotated `Effect` gets the effect, and the model does not see it. The result is
    JSON, or a value that pydantic can write as JSON.

    A sync function runs in a worker thread, which cannot be cancelled: a cancelled run
    of a writing tool waits for its thread, and records the outcome first.

    ``side_effects`` is ``"write"`` or ``"read"``. The other options are those of
    `EffectLedger.run` that are not of one call. Wrong ones raise ``TypeError`` or
    ``ValueError``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str = "",
        side_effects: Literal["read", "write"] = "write",
        **options: Unpack[EffectOptions],
    ) -> None:
        if side_effects not in ("read", "write"):
            raise ValueError(
                f"side_effects must be 'read' or 'write', not {side_effects!r}"
            )

        for one in ("idempotency_key", "tool_call_id"):
            if one in options:
                raise TypeError(f"{one} is of one call, not of a tool; see key='call'")

        Options(**options)  # checks them
        self.function = function
        self.signature = inspect.signature(function)
        self.name = name or function.__name__
        self.side_effects = side_effects
        self.options = options
        check_no_generator(f"tool {self.name!r}", function)

        fields = options.get("key_fields") or ()
        shown = self.signature.parameters.values()
        # Not with **arguments, which would take what cannot be passed by name.
        named = {one.name: one for one in shown if one.kind != one.VAR_KEYWORD}

        try:
            inspect.Signature([*named.values()]).bind(**named)
            self.signature.bind_partial(**dict.fromkeys(fields))
        except TypeError as exc:
            raise TypeError(
                f"tool {self.name!r}: a model passes arguments by name, and key_fields "
                f"names some of them: {exc}"
            ) from None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, without a ledger."""
        return self.function(*args, **kwargs)

    @property
    def description(self) -> str:
        """The description for the model: the function's docstring."""
        return inspect.getdoc(self.function) or ""

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        return self._validator.json_schema()

    def validated(self, args: Mapping[str, JsonValue] | str) -> dict[str, Any]:
        """Return the arguments as the function takes them, with defaults filled in.

        They are an object, or the JSON text of one. Raises pydantic's
        ``ValidationError``.
        """
        if isinstance(args, str):
            args = _OBJECT.validate_json(args)

        named: Any = ArgsKwargs((), _OBJECT.validate_python(args))
        valid: dict[str, Any] = self._validator.validate_python(named)
        return valid

    async def execute(self, args: Mapping[str, Any], effect: Effect | None) -> Any:
        """Call the function with validated arguments; return its result as JSON."""
        call = partial(self.function, **args)

        if self._effect_name is not None:
            call = partial(call, **{self._effect_name: effect})

        # Only a tool that reads may be left to its thread when it is cancelled.
        return await call_function(call, may_be_left=effect is None)

    def plan(
        self,
        ledger: RunsEffects,
        thread_id: str,
        valid: Mapping[str, Any],
        **options: Unpack[EffectOptions],
    ) -> EffectPlan:
        """Return the effect of a call with these validated arguments."""
        merged = ledger.options.merged({**self.options, **options})
        return plan_effect(thread_id, self.name, arguments_json(valid), merged)

    @cached_property
    def _hints(self) -> dict[str, Any]:
        return typing.get_type_hints(self.function, include_extras=True)

    @cached_property
    def _effect_name(self) -> str | None:
        effects = Effect, Effect | None
        names = self.signature.parameters
        return next((one for one in names if self._hints.get(one) in effects), None)

    @cached_property
    def _validator(self) -> TypeAdapter[Any]:
        """Validates the arguments of a call, without calling the function."""

        def arguments(**named: Any) -> dict[str, Any]:
            return named

        shown = [
            one.replace(annotation=self._hints.get(name, Any))
            for name, one in self.signature.parameters.items()
            if name != self._effect_name
        ]
        vars(arguments)["__signature__"] = inspect.Signature(shown)
        arguments.__annotations__ = {one.name: one.annotation for one in shown}
        adapter: TypeAdapter[Any] = TypeAdapter(cast("Any", arguments))
        return adapter


@overload
def tool(function: Callable[..., Any], /, **options: Any) -> Tool: ...
@overload
def tool(**options: Any) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a `Tool` from a function: as a decorator, or called; with its options."""
    return partial(Tool, **options) if function is None else Tool(function, **options)


async def call_function(call: partial[Any], *, may_be_left: bool = False) -> Any:
    """Call a function, a sync one in a worker thread; return its result as JSON."""
    if inspect.iscoroutinefunction(call.func):
        result = await call()
    else:
        result = await _in_thread(call, may_be_left)

        if inspect.isawaitable(result):
            result = await result

    try:
        return to_jsonable_python(result)
    except Exception as exc:
        # The effect has happened, so this must not count as a failure of the tool.
        raise SerializationError(("result",), exception_message(exc)) from exc


async def _in_thread(call: Callable[[], Any], may_be_left: bool) -> Any:
    """Run a function in a thread; wait for it also if the caller is cancelled.

    Then the cancellation is raised at the caller's next await: an effect must not go on
    in a thread while another process takes it for dead.
    """

    def run() -> Any:
        try:
            return call()
        except StopIteration as exc:
            # Before Python 3.11.8 and 3.12.2, asyncio would wait for ever.
            raise RuntimeError("the tool raised StopIteration") from exc

    # Not a task: the end of asyncio.run cancels all tasks, and no thread.
    loop, caller = asyncio.get_running_loop(), asyncio.current_task()
    work = loop.run_in_executor(None, copy_context().run, run)
    cancelled = False

    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            if may_be_left:
                work.cancel()  # if no thread was free yet, it is not begun
                raise

            cancelled = True

    if cancelled and caller is not None:
        caller.uncancel()
        caller.cancel()

    return work.result()


def arguments_json(valid: Mapping[str, Any]) -> dict[str, JsonValue]:
    """Return validated arguments as pydantic writes them, but with sets sorted.

    The order of a set differs between processes (``PYTHONHASHSEED``). Unsorted, the
    same call would be another effect in each process. Raises ``SerializationError``,
    for a set of models too.
    """
    try:
        return {name: _as_json(value) for name, value in valid.items()}
    except (ValueError, TypeError, RecursionError) as exc:
        raise SerializationError(("args",), str(exc)) from exc


def _as_json(value: Any) -> Any:
    if isinstance(value, BaseModel) or is_dataclass(value):
        # Dicts, with the serializers, aliases, computed fields and extras of the JSON.
        value = _ANY.dump_python(value, by_alias=True, warnings=False)

    if isinstance(value, (set, frozenset)):
        return sorted(map(_as_json, value), key=canonical_json)

    if isinstance(value, (list, tuple, deque)):
        return list(map(_as_json, value))

    if isinstance(value, Mapping):
        names = to_jsonable_python(dict.fromkeys(value))
        return dict(zip(names, map(_as_json, value.values()), strict=True))

    return to_jsonable_python(value)


# The registry


class RunsEffects(Protocol):
    """What a registry needs of its ledger."""

    options: Options

    async def execute(self, plan: EffectPlan, handler: Handler) -> RunResult:
        """Run a planned effect, and return how it ended."""
        ...


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """What to answer the model, and where the answer comes from.

    ``content`` is the result, or with ``is_error`` a message that says what went wrong.
    ``replayed`` is true if this call did not run the tool. ``record`` is the effect's,
    ``None`` if nothing was recorded.
    """

    content: Any
    is_error: bool = False
    replayed: bool = False
    record: CallRecord | None = None


class ToolRegistry:
    """Runs tools by name, each mutating call once."""

    def __init__(self, ledger: RunsEffects, tools: Iterable[Tool] = ()) -> None:
        self.ledger = ledger
        self._tools: dict[str, Tool] = {}

        for tool in tools:
            self.add(tool)

    def add(self, one: Tool) -> Tool:
        """Register a tool under its name, which no other tool may have."""
        if not isinstance(one, Tool):
            raise TypeError(
                f"a registry takes tools, not {one!r:.80}; make one with @tool or "
                "tool(function)"
            )

        if self._tools.get(one.name, one) is not one:
            raise ValueError(f"a tool named {one.name!r} is already registered")

        self._tools[one.name] = one
        return one

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __getitem__(self, name: str) -> Tool:
        return self._tools[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    async def dispatch(
        self,
        thread_id: str,
        name: str,
        args: Mapping[str, JsonValue] | str,
        *,
        tool_call_id: str | None = None,
    ) -> ToolOutcome:
        """Run a model's tool call, or replay it.

        ``args`` is an object, or the JSON text of one, as models hand it over. A
        read-only tool runs each time and is not recorded. A writing tool is an effect
        of the ledger. Its validated arguments, with defaults filled in, name the
        effect, people approve them, and the function gets exactly what was recorded.

        These are outcomes with ``is_error``: an unknown tool, arguments that fit
        neither the signature nor a record, a failure, and a denial. Raises for the
        agent ``EffectTimeout``, ``EffectErased`` and what the store raises.
        """
        tool = self._tools.get(name)

        if tool is None:
            known = ", ".join(sorted(self._tools)) or "none"
            return ToolOutcome(f"unknown tool {name!r}; known tools: {known}", True)

        try:
            valid = tool.validated(args)

            if tool.side_effects == "read":
                return await _read(tool, valid)

            # A function with ``**arguments`` may be called without one of them.
            for field in tool.options.get("key_fields") or ():
                if field not in valid:
                    raise TypeError(f"{field!r} must be given")

            plan = tool.plan(self.ledger, thread_id, valid, tool_call_id=tool_call_id)
            # The function gets them from the record, which people approve.
            recorded = tool.validated(plan.effect.args)

            if lost := [one for one in valid if recorded.get(one, tool) != valid[one]]:
                raise TypeError(
                    f"the JSON of {lost[0]!r} does not keep everything, so another "
                    "process could not run the same call; is a field excluded, renamed "
                    "or masked there?"
                )
        except (ValidationError, TypeError, SerializationError) as exc:
            return ToolOutcome(f"arguments of {name!r}: {_problems(exc)}", True)

        return await _execute(self.ledger, plan, tool)


async def run_recorded(
    ledger: RunsEffects, attempts: Attempts, tool: Tool, record: CallRecord
) -> ToolOutcome | None:
    """Run a tool with the arguments of a record again, without waiting for people.

    Returns ``None``, and logs why, if the tool or the ledger does not take the
    arguments any more, or would give the effect another key or other arguments.
    """
    effect, asked = effect_of(record), asked_args(record)

    if effect is None:
        return None

    try:
        place, valid = (ledger, effect.thread_id), tool.validated(asked)
        named = effect.tool_call_id
        plan = tool.plan(*place, valid, tool_call_id=named, approval_timeout=0)
        key, _ = await attempts.newest(plan.effect.key)

        # Fields that are not in the key may differ too, if the tool has changed.
        if key != effect.key or plan.effect.args != asked:
            raise ValueError("it would be another effect now")
    except (ValueError, TypeError, CheckpointerError) as exc:
        log.warning("%s is not run again: %s", tool.name, exc)
        return None

    try:
        return await _execute(ledger, replace(plan, is_recovered=True), tool)
    except EffectTimeout as exc:
        return ToolOutcome(str(exc), True)


async def _execute(ledger: RunsEffects, plan: EffectPlan, tool: Tool) -> ToolOutcome:
    def handler(effect: Effect) -> Awaitable[Any]:
        # The recorded arguments, which a person may have changed.
        return tool.execute(tool.validated(effect.args), effect)

    try:
        result = await ledger.execute(plan, handler)
    except (EffectDenied, PayloadTooLarge) as exc:
        return ToolOutcome(str(exc), True)

    is_error = result.error is not None
    content = result.value if result.error is None else _message(result.error)
    return ToolOutcome(content, is_error, result.replayed, result.record)


async def _read(tool: Tool, valid: dict[str, Any]) -> ToolOutcome:
    try:
        return ToolOutcome(copy_json(await tool.execute(valid, None), "result"))
    except Exception as exc:
        return ToolOutcome(_message(exc), True)


def _message(exc: Exception) -> str:
    """Return the message for the model about any exception."""
    if isinstance(exc, EffectFailed):
        return str(exc)

    is_harmless = isinstance(exc, NoEffect)
    kind = "nothing happened" if is_harmless else type(exc).__qualname__
    return f"{kind}: {exception_message(exc)}"


def _problems(exc: ValidationError | TypeError | SerializationError) -> str:
    if not isinstance(exc, ValidationError):
        return str(exc)

    return "; ".join(
        f"{'.'.join(map(str, problem['loc'])) or 'arguments'}: {problem['msg']}"
        for problem in exc.errors(include_url=False, include_input=False)
    )
