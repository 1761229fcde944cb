"""Tools: functions that a model may call, and the registry that runs them once."""

from __future__ import annotations

import asyncio
import inspect
import json
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    Verify,
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

SideEffects = Literal["read", "write"]

_ANY: TypeAdapter[Any] = TypeAdapter(Any)
"""Writes each value by its own type."""


class Tool:
    """A function that a model may call, with what it does to the world.

    The function is sync or async, and takes its arguments by name. One parameter may be
    annotated `Effect`. The model does not see this parameter: the ledger passes the
    effect, with the key to pass downstream and the attempt. The result is JSON, or a
    value that pydantic can write as JSON.

    A sync function runs in a worker thread, so that it does not block the event loop. A
    thread cannot be cancelled: a cancelled run of a writing tool waits for its thread,
    records the outcome, and ends as cancelled then.

    ``side_effects`` is ``"write"`` or ``"read"``. The other options are those of
    `EffectLedger.run`; those that are left out are the ledger's. An option that does
    not exist is a ``TypeError``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str = "",
        side_effects: SideEffects = "write",
        **options: Unpack[EffectOptions],
    ) -> None:
        if side_effects not in ("read", "write"):
            raise ValueError(
                f"side_effects must be 'read' or 'write', not {side_effects!r}"
            )

        if not callable(function):
            raise TypeError(f"a tool is made of a function, not {function!r:.80}")

        for one in ("idempotency_key", "tool_call_id"):
            if one in options:
                raise TypeError(f"{one} is of one call, not of a tool; see key='call'")

        Options(**options)  # checks them
        self.function = function
        self.name = name or function.__name__
        self.side_effects = side_effects
        self.options = options
        check_no_generator(f"tool {self.name!r}", function)
        unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
        parameters = self._signature.parameters

        for parameter in parameters.values():
            if parameter.kind in unnamed:
                raise TypeError(
                    f"tool {self.name!r}: a model passes arguments by name, and "
                    f"parameter {parameter.name!r} cannot be passed by name"
                )

        takes_any = any(
            one.kind == inspect.Parameter.VAR_KEYWORD for one in parameters.values()
        )
        unknown = [name for name in self.key_fields if name not in parameters]

        if unknown and not takes_any:
            raise ValueError(
                f"tool {self.name!r}: key_fields names "
                f"{', '.join(map(repr, unknown))}, which are not parameters of it; "
                f"it has {', '.join(map(repr, parameters)) or 'none'}"
            )

    def __repr__(self) -> str:
        return f"<Tool {self.name!r}>"

    @property
    def verify(self) -> Verify | None:
        """The function that says whether an effect of this tool landed."""
        return self.options.get("verify")

    @property
    def key_fields(self) -> Sequence[str]:
        """The arguments that name an effect; empty if all do."""
        return self.options.get("key_fields") or ()

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

    def validated(self, args: Mapping[str, JsonValue]) -> dict[str, Any]:
        """Return the arguments as the function takes them, with defaults filled in.

        Raises pydantic's ``ValidationError``.
        """
        valid: dict[str, Any] = self._validator.validate_python(
            ArgsKwargs((), dict(args))
        )
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
        options: EffectOptions,
    ) -> EffectPlan:
        """Return the effect of a call with these validated arguments."""
        merged = ledger.options.merged({**self.options, **options})
        return plan_effect(thread_id, self.name, arguments_json(valid), merged)

    async def handle(self, effect: Effect) -> Any:
        """Run an effect with the recorded arguments; a person may have changed them."""
        return await self.execute(self.validated(effect.args), effect)

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    @cached_property
    def _hints(self) -> dict[str, Any]:
        return typing.get_type_hints(self.function, include_extras=True)

    @cached_property
    def _effect_name(self) -> str | None:
        return next(
            (
                name
                for name, hint in self._hints.items()
                if name != "return" and hint in (Effect, Effect | None)
            ),
            None,
        )

    @cached_property
    def _validator(self) -> TypeAdapter[Any]:
        """Validates the arguments of a call, without calling the function."""

        def arguments(**named: Any) -> dict[str, Any]:
            return named

        hints = {
            name: self._hints.get(name, Any)
            for name in self._signature.parameters
            if name != self._effect_name
        }
        parameters = [
            parameter.replace(annotation=hints[name])
            for name, parameter in self._signature.parameters.items()
            if name in hints
        ]
        vars(arguments)["__signature__"] = inspect.Signature(parameters)
        arguments.__annotations__ = hints
        adapter: TypeAdapter[Any] = TypeAdapter(cast("Any", arguments))
        return adapter


@overload
def tool(function: Callable[..., Any], /, **options: Any) -> Tool: ...
@overload
def tool(**options: Any) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a `Tool` from a function: as a decorator with or without options, or called.

    The options are those of `Tool`.
    """
    return partial(Tool, **options) if function is None else Tool(function, **options)


async def call_function(call: partial[Any], *, may_be_left: bool = False) -> Any:
    """Call a function, a sync one in a worker thread; return its result as JSON.

    A cancelled caller waits for the thread, unless it ``may_be_left``.
    """
    if inspect.iscoroutinefunction(call.func):
        result = await call()
    else:
        run = asyncio.to_thread if may_be_left else _to_thread_to_the_end
        result = await run(partial(_call, call))

        if inspect.isawaitable(result):
            result = await result

    try:
        return to_jsonable_python(result)
    except Exception as exc:
        # The effect has happened, so this must not count as a failure of the tool.
        raise SerializationError(("result",), exception_message(exc)) from exc


def _call(function: Callable[[], Any]) -> Any:
    """Call a function in a thread; its ``StopIteration`` is a ``RuntimeError``.

    asyncio cannot pass it on: before Python 3.11.8 and 3.12.2, its caller waits for
    ever.
    """
    try:
        return function()
    except StopIteration as exc:
        raise RuntimeError("the tool raised StopIteration") from exc


async def _to_thread_to_the_end(call: Callable[[], Any]) -> Any:
    """Run a function in a thread; return its result even if the caller is cancelled.

    The cancellation is raised at the caller's next await, when the result is known. An
    effect must not go on in a thread while another process takes it for dead.
    """
    loop = asyncio.get_running_loop()
    # Not a task: the end of asyncio.run cancels all tasks, and no thread.
    work = loop.run_in_executor(None, copy_context().run, call)
    cancelled = False

    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            cancelled = True

    caller = asyncio.current_task()

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

        ``args`` is an object, or the JSON text of one, as models hand it over.

        These are outcomes with ``is_error``: an unknown tool, arguments that fit
        neither the signature nor a record (then nothing is recorded), a failure, and a
        denial. Raises ``EffectTimeout``, ``EffectErased`` and what the store raises:
        these errors are for the agent, not for the model.

        A read-only tool runs each time and is not recorded. A writing tool is an effect
        of the ledger. Its validated arguments, with defaults filled in, name the
        effect, people approve them, and the function gets exactly what was recorded.
        """
        tool = self._tools.get(name)

        if tool is None:
            known = ", ".join(sorted(self._tools)) or "none"
            return ToolOutcome(f"unknown tool {name!r}; known tools: {known}", True)

        try:
            valid = tool.validated(_parsed(args))
        except (ValidationError, TypeError) as exc:
            return ToolOutcome(f"arguments of {name!r}: {_problems(exc)}", True)

        if tool.side_effects == "read":
            return await _read(tool, valid)

        return await _write(self.ledger, thread_id, tool, valid, tool_call_id)


async def _write(
    ledger: RunsEffects,
    thread_id: str,
    tool: Tool,
    valid: dict[str, Any],
    tool_call_id: str | None,
) -> ToolOutcome:
    # A function with ``**arguments`` may be called without one that names the effect.
    missing = [name for name in tool.key_fields if name not in valid]

    if missing:
        names = ", ".join(map(repr, missing))
        return ToolOutcome(f"arguments of {tool.name!r}: {names} must be given", True)

    try:
        plan = tool.plan(ledger, thread_id, valid, {"tool_call_id": tool_call_id})
        _check_recorded(tool, valid, plan.effect.args)
    except SerializationError as exc:
        return ToolOutcome(f"arguments of {tool.name!r}: {exc}", True)

    return await _execute(ledger, plan, tool)


def _check_recorded(
    tool: Tool, valid: dict[str, Any], args: Mapping[str, JsonValue]
) -> None:
    """Raise ``SerializationError`` unless the record has all of the arguments.

    The function gets them from the record, which people approve.
    """
    try:
        recorded = tool.validated(args)
    except ValidationError as exc:
        raise SerializationError(("args",), _problems(exc)) from exc

    for name, value in valid.items():
        if recorded.get(name, tool) != value:
            raise SerializationError(
                ("args", name),
                "its JSON does not keep everything, so another process could not run "
                "the same call; is a field excluded, renamed or masked there?",
            )


async def run_recorded(
    ledger: RunsEffects,
    attempts: Attempts,
    tool: Tool,
    record: CallRecord,
) -> ToolOutcome | None:
    """Run a tool with the arguments of a record again, without waiting for people.

    Returns ``None``, and logs why, if the tool or the ledger does not take the
    arguments any more, or would give the effect another key or other arguments.
    """
    effect, asked = effect_of(record), asked_args(record)

    if effect is None or not isinstance(asked, dict):
        return None

    options: EffectOptions = {
        "tool_call_id": effect.tool_call_id,
        "approval_timeout": 0,
    }
    change = None

    try:
        plan = tool.plan(ledger, effect.thread_id, tool.validated(asked), options)
        key, _ = await attempts.newest(plan.effect.key)
    except (ValueError, TypeError, CheckpointerError) as exc:
        change = str(exc)
    else:
        # Fields that are not in the key may differ too, if the tool has changed.
        if canonical_json(plan.effect.args) != canonical_json(asked):
            change = "its arguments would change"
        elif key != effect.key:
            change = "it would be another effect now"

    if change is not None:
        log.warning("%s is not run again: %s", tool.name, change)
        return None

    try:
        return await _execute(ledger, replace(plan, is_recovered=True), tool)
    except EffectTimeout as exc:
        return ToolOutcome(str(exc), True)


async def _execute(ledger: RunsEffects, plan: EffectPlan, tool: Tool) -> ToolOutcome:
    try:
        result = await ledger.execute(plan, tool.handle)
    except (EffectDenied, PayloadTooLarge) as exc:
        return ToolOutcome(str(exc), True)

    is_error = result.error is not None
    content = result.value if result.error is None else _message(result.error)
    return ToolOutcome(content, is_error, result.replayed, result.record)


def _parsed(args: Mapping[str, JsonValue] | str) -> Mapping[str, JsonValue]:
    """Return arguments that may be JSON text; raise ``TypeError`` for another value."""
    found: object = args

    if isinstance(args, str):
        try:
            found = json.loads(args)
        except (ValueError, RecursionError) as exc:
            raise TypeError(f"not JSON: {exc}") from None

    if not isinstance(found, Mapping):
        raise TypeError(f"must be a JSON object, not {args!s:.40}")

    return found


async def _read(tool: Tool, valid: dict[str, Any]) -> ToolOutcome:
    try:
        return ToolOutcome(copy_json(await tool.execute(valid, None), "result"))
    except Exception as exc:
        return ToolOutcome(_message(exc), True)


def _message(exc: Exception) -> str:
    """Return the message for the model about any exception."""
    message = exception_message(exc)

    if isinstance(exc, EffectFailed):
        return str(exc)

    if isinstance(exc, NoEffect):
        return f"nothing happened: {message}"

    return f"{type(exc).__qualname__}: {message}"


def _problems(exc: ValidationError | TypeError) -> str:
    if isinstance(exc, TypeError):
        return str(exc)

    return "; ".join(
        f"{'.'.join(map(str, problem['loc'])) or 'arguments'}: {problem['msg']}"
        for problem in exc.errors(include_url=False, include_input=False)
    )
