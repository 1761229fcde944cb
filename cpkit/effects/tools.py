"""Tools: functions that a model may call, and the registry that runs them once."""

from __future__ import annotations

import asyncio
import inspect
import json
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, Protocol, cast, overload

from pydantic import BaseModel, RootModel, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs, to_jsonable_python

from cpkit.canonical import canonical_json
from cpkit.effects.effect import (
    LEDGER_DEFAULT,
    Effect,
    EffectPlan,
    EffectSpec,
    Handler,
    LedgerDefault,
    LedgerSettings,
    NoEffect,
    Scope,
    Verify,
    check_callback,
    copy_json,
    is_awaitable,
    plan_effect,
)
from cpkit.effects.errors import EffectDenied, EffectFailed, EffectTimeout
from cpkit.effects.records import exception_message
from cpkit.effects.run import RunResult
from cpkit.effects.tracing import log
from cpkit.errors import CheckpointerError, PayloadTooLarge, SerializationError
from cpkit.records import CallRecord, JsonValue

__all__ = ["RunsEffects", "Tool", "ToolOutcome", "ToolRegistry", "run_recorded", "tool"]

SideEffects = Literal["read", "write"]

_ANY: TypeAdapter[Any] = TypeAdapter(Any)
"""Writes each value by its own type."""


@dataclass(frozen=True)
class Tool:
    """A function that a model may call, with what it does to the world.

    The function is sync or async, and takes its arguments by name. One parameter may be
    annotated `Effect`. The model does not see this parameter: the ledger passes the
    effect, with the key to pass downstream and the attempt. The result is JSON, or a
    value that pydantic can write as JSON.

    A sync function runs in a worker thread, so that it does not block the event loop. A
    thread cannot be cancelled: a cancelled run of a writing tool waits for its thread,
    records the outcome, and ends as cancelled then.

    ``side_effects`` is ``"write"`` or ``"read"``. ``verify``, ``key_fields``,
    ``scope``, ``stale_after`` and ``release_failures`` are those of
    `EffectLedger.run`.
    """

    function: Callable[..., Any]
    name: str = ""
    side_effects: SideEffects = "write"
    verify: Verify | None = None
    key_fields: Sequence[str] | None = None
    scope: Scope = "thread"
    stale_after: float | None | LedgerDefault = LEDGER_DEFAULT
    release_failures: bool | None = None

    def __post_init__(self) -> None:
        if self.side_effects not in ("read", "write"):
            raise ValueError(
                f"side_effects must be 'read' or 'write', not {self.side_effects!r}"
            )

        if not callable(self.function):
            raise TypeError(f"a tool is made of a function, not {self.function!r:.80}")

        if self.verify is not None:
            check_callback("verify", self.verify, "effect")

        if not self.name:
            object.__setattr__(self, "name", self.function.__name__)

        unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)

        for parameter in self._signature.parameters.values():
            if parameter.kind in unnamed:
                raise TypeError(
                    f"tool {self.name!r}: a model passes arguments by name, and "
                    f"parameter {parameter.name!r} cannot be passed by name"
                )

        self._check_key_fields()

    def _check_key_fields(self) -> None:
        if self.key_fields is None:
            return

        if isinstance(self.key_fields, str) or not self.key_fields:
            raise ValueError(
                f"tool {self.name!r}: key_fields is a list of parameter names, not "
                f"{self.key_fields!r}"
            )

        parameters = self._signature.parameters
        any_name = inspect.Parameter.VAR_KEYWORD

        if any(one.kind == any_name for one in parameters.values()):
            return

        unknown = [name for name in self.key_fields if name not in parameters]

        if unknown:
            raise ValueError(
                f"tool {self.name!r}: key_fields names "
                f"{', '.join(map(repr, unknown))}, which are not parameters of it; "
                f"it has {', '.join(map(repr, parameters)) or 'none'}"
            )

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

        if inspect.iscoroutinefunction(self.function):
            result = await call()
        else:
            # Only a tool that reads may be left to its thread when it is cancelled.
            run = asyncio.to_thread if effect is None else _to_thread_to_the_end
            result = await run(partial(_call, call))

            if is_awaitable(result):
                result = await result

        try:
            return to_jsonable_python(result)
        except Exception as exc:
            # The effect has happened, so this must not count as a failure of the tool.
            raise SerializationError(("result",), exception_message(exc)) from exc

    def spec(
        self, thread_id: str, valid: Mapping[str, Any], tool_call_id: str | None
    ) -> EffectSpec:
        """Return the effect of a call with these validated arguments."""
        return EffectSpec(
            thread_id=thread_id,
            tool=self.name,
            args=arguments_json(valid),
            scope=self.scope,
            key_fields=self.key_fields,
            tool_call_id=tool_call_id,
            verify=self.verify,
            stale_after=self.stale_after,
            release_failures=self.release_failures,
        )

    @property
    def wants_effect(self) -> bool:
        """Whether the function has a parameter for its `Effect`."""
        return self._effect_name is not None

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
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str = "",
    side_effects: SideEffects = "write",
    verify: Verify | None = None,
    key_fields: Sequence[str] | None = None,
    scope: Scope = "thread",
    stale_after: float | None | LedgerDefault = LEDGER_DEFAULT,
    release_failures: bool | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a `Tool` from a function; usable with and without options."""
    if function is not None:
        return Tool(function)

    return partial(Tool, **options)


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
    effect must not go on in a thread while another process takes it for dead. Raises
    ``NoEffect`` if the function did not start, and then it never does.
    """
    loop = asyncio.get_running_loop()
    context = copy_context()
    result: Future[Any] = Future()

    def run() -> None:
        if not result.set_running_or_notify_cancel():
            return

        try:
            result.set_result(context.run(call))
        except BaseException as exc:
            result.set_exception(exc)

    try:
        queued = loop.run_in_executor(None, run)
    except Exception as exc:
        # If no thread can be started, the executor has queued the function already.
        # Once its future is cancelled here, it does nothing when a thread calls it.
        if result.cancel():
            raise NoEffect(f"no thread ran the tool: {exc}") from exc
    else:
        # An executor that shuts down may drop what it queued.
        queued.add_done_callback(lambda _: result.cancel())

    # Not a task: the end of asyncio.run cancels all tasks, and no thread.
    work = asyncio.wrap_future(result)
    caller = asyncio.current_task()
    assert caller is not None
    cancelled = False

    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            cancelled = True

    if cancelled:
        caller.uncancel()
        caller.cancel()

    return work.result()


def arguments_json(valid: Mapping[str, Any]) -> dict[str, JsonValue]:
    """Return validated arguments as pydantic writes them, but with sets sorted.

    The order of a set differs between processes (``PYTHONHASHSEED``). Unsorted, the
    same call would be another effect in each process. Raises ``SerializationError``.
    """
    try:
        arguments: dict[str, JsonValue] = _sorted(valid, to_jsonable_python(valid))
    except (ValueError, RecursionError) as exc:
        raise SerializationError(("args",), str(exc)) from exc

    return arguments


def _sorted(value: object, written: Any) -> Any:
    """Return ``written``, the JSON of ``value``, with the members of sets sorted."""
    if isinstance(value, BaseModel) or is_dataclass(value):
        return _sorted(_dumped(value), written)

    if isinstance(written, list) and isinstance(value, (set, frozenset)):
        if any(isinstance(one, (list, dict)) for one in written):
            # Sets of sets. Pydantic's dump has copies of them, and the order of a copy
            # may differ from the order in the JSON.
            written = [_sorted(one, to_jsonable_python(one)) for one in value]

        return sorted(written, key=canonical_json)

    if isinstance(written, list) and isinstance(value, (list, tuple, deque)):
        return [_sorted(*pair) for pair in zip(value, written, strict=True)]

    if isinstance(written, dict) and isinstance(value, Mapping):
        # Other keys than text are written as text, in the same order.
        names = dict(zip(value, written, strict=False))

        for key, inner in value.items():
            name = key if isinstance(key, str) else names.get(key)

            if name in written:
                written[name] = _sorted(inner, written[name])

    return written


def _dumped(value: Any) -> object:
    """Return a model or dataclass as pydantic writes it, but with sets still as sets.

    So the serializers, aliases, computed fields and extras are those of the JSON.
    """
    try:
        return _ANY.dump_python(value, by_alias=True, warnings=False)
    except (TypeError, ValueError):
        # A set of models: pydantic writes them as dicts, which no set can hold.
        if isinstance(value, RootModel):
            return value.root

        of_pydantic: dict[str, Any] = getattr(type(value), "__pydantic_fields__", {})
        names = of_pydantic or [field.name for field in fields(value)]
        return {
            getattr(of_pydantic.get(name), "serialization_alias", None) or name: (
                getattr(value, name)
            )
            for name in names
        }


# The registry


class RunsEffects(Protocol):
    """What a registry needs of its ledger."""

    settings: LedgerSettings

    async def execute(
        self, plan: EffectPlan, handler: Handler, *, wants_attempt: bool = True
    ) -> RunResult:
        """Run a planned effect, and return how it ended."""
        ...


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """What to answer the model, and where the answer comes from.

    ``content`` is the result, or with ``is_error`` a message that says what went wrong.
    ``replayed`` is true if this call did not run the tool. ``record`` is the effect's,
    ``None`` if nothing was recorded.
    """

    content: JsonValue
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
        """Register a tool under its name, which must be new."""
        if not isinstance(one, Tool):
            raise TypeError(
                f"a registry takes tools, not {one!r:.80}; make one with @tool or "
                "tool(function)"
            )

        if one.name in self._tools:
            raise ValueError(f"a tool named {one.name!r} is already registered")

        self._tools[one.name] = one
        return one

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __getitem__(self, name: str) -> Tool:
        return self._tools[name]

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
        neither the signature nor a record, a failure, and a denial. The first two
        record nothing.

        A read-only tool runs each time and is not recorded. A mutating tool is an
        effect of the ledger. Its validated arguments, with defaults filled in, name the
        effect, people approve them, and the function gets exactly what was recorded.
        Arguments of which JSON does not keep everything (an excluded field, a secret)
        are refused. ``tool_call_id`` is kept with the record only:
        models repeat it within a thread, so it does not tell two calls apart.

        Raises ``EffectTimeout``, ``EffectErased`` and what the store raises. These
        errors are for the agent, not for the model.
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
    missing = [name for name in tool.key_fields or () if name not in valid]

    if missing:
        names = ", ".join(map(repr, missing))
        return ToolOutcome(f"arguments of {tool.name!r}: {names} must be given", True)

    try:
        spec = tool.spec(thread_id, valid, tool_call_id)
        plan = plan_effect(spec, ledger.settings)
        recorded = _recorded(tool, valid, spec.args)
    except (SerializationError, PayloadTooLarge) as exc:
        return ToolOutcome(f"arguments of {tool.name!r}: {exc}", True)

    return await _execute(ledger, plan, tool, recorded)


def _recorded(
    tool: Tool, valid: dict[str, Any], args: Mapping[str, JsonValue]
) -> dict[str, Any]:
    """Return the arguments as they are read from the record, which people approve.

    Raises ``SerializationError`` if they are not the validated ones.
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

    return recorded


async def run_recorded(
    ledger: RunsEffects, thread_id: str, tool: Tool, effect: Effect
) -> ToolOutcome | None:
    """Run a tool with the arguments of a recorded effect, without waiting for people.

    Returns ``None``, and logs why, if the tool or the ledger does not take the
    arguments any more, or would give the effect another key or other arguments.
    """
    try:
        valid = tool.validated(effect.args)
        spec = tool.spec(thread_id, valid, effect.tool_call_id)
        plan = plan_effect(replace(spec, approval_timeout=0), ledger.settings)
        plan = replace(plan, is_recovered=True)
    except (ValueError, TypeError, CheckpointerError) as exc:
        log.warning("%s is not run again: %s", tool.name, exc)
        return None

    # Fields that are not in the key may differ too, if the tool has changed.
    if plan.effect.key != effect.key or (
        canonical_json(plan.effect.args) != canonical_json(effect.args)
    ):
        log.warning("%s is not run again: it would be another effect now", tool.name)
        return None

    try:
        return await _execute(ledger, plan, tool, valid)
    except EffectTimeout as exc:
        return ToolOutcome(str(exc), True)


async def _execute(
    ledger: RunsEffects, plan: EffectPlan, tool: Tool, valid: dict[str, Any]
) -> ToolOutcome:
    try:
        result = await ledger.execute(
            plan, partial(tool.execute, valid), wants_attempt=tool.wants_effect
        )
    except EffectDenied as exc:
        return ToolOutcome(str(exc), True)

    try:
        content = result.value()
    except EffectFailed as exc:
        return ToolOutcome(str(exc), True, result.replayed, result.record)
    except Exception as exc:
        if exc is not result.raised:
            raise

        return ToolOutcome(_message(exc), True, False, result.record)

    return ToolOutcome(content, False, result.replayed, result.record)


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
