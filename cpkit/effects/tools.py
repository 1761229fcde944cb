"""Tools: functions with a declared side effect, and the registry that runs them."""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, cast, overload

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs, to_jsonable_python

from cpkit.effects.arguments import arguments_json
from cpkit.effects.effect import Effect, NoEffect, Verify
from cpkit.effects.envelope import told
from cpkit.effects.errors import EffectDenied, EffectFailed
from cpkit.effects.keys import Scope, plain
from cpkit.effects.ledger import DEFAULT, EffectLedger, _Default
from cpkit.errors import PayloadTooLarge, SerializationError
from cpkit.records import CallRecord, JsonValue

__all__ = ["Tool", "ToolOutcome", "ToolRegistry", "tool"]

SideEffects = Literal["read", "write"]


@dataclass(frozen=True)
class Tool:
    """A function that a model may call, with what it does to the world.

    The function takes its arguments by name, is sync or async, and may have one
    parameter annotated `Effect`, which is no argument of the model's: it is given the
    effect, with the key to pass downstream and the attempt. A sync function runs in a
    thread of its own, so that it does not hold up the event loop; whoever cancels its
    run does not stop that thread. Its result is JSON, or what pydantic can write as
    JSON.

    ``side_effects`` is ``"write"`` unless it says ``"read"``. ``verify``,
    ``key_fields``, ``scope``, ``stale_after`` and ``release_failures`` are those of
    `EffectLedger.run`.
    """

    function: Callable[..., Any]
    name: str = ""
    side_effects: SideEffects = "write"
    verify: Verify | None = None
    key_fields: Sequence[str] | None = None
    scope: Scope = "thread"
    stale_after: float | None | _Default = DEFAULT
    release_failures: bool | None = None

    def __post_init__(self) -> None:
        if self.side_effects not in ("read", "write"):
            raise ValueError(
                f"side_effects is 'read' or 'write', not {self.side_effects!r}"
            )

        if not self.name:
            object.__setattr__(self, "name", self.function.__name__)

        unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)

        for parameter in self._signature.parameters.values():
            if parameter.kind in unnamed:
                raise TypeError(
                    f"tool {self.name!r}: parameter {parameter.name!r} has no name "
                    "that a model could use"
                )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, past any ledger."""
        return self.function(*args, **kwargs)

    @property
    def description(self) -> str:
        """What the model is told: the function's docstring."""
        return inspect.getdoc(self.function) or ""

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        return self._validator.json_schema()

    def validated(self, args: Mapping[str, JsonValue]) -> dict[str, Any]:
        """Return the arguments as the function takes them, defaults filled in.

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
            result = await asyncio.to_thread(call)

            if inspect.isawaitable(result):
                result = await result

        try:
            return to_jsonable_python(result)
        except Exception as exc:
            # The effect has happened: this must not be taken for a failure of the tool.
            raise SerializationError(("result",), str(exc)) from exc

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
        """Validate a call of the function without making it."""

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
    stale_after: float | None | _Default = DEFAULT,
    release_failures: bool | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a `Tool` of a function, with or without options."""
    if function is not None:
        return Tool(function)

    return partial(Tool, **options)


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """What to tell the model, and where it comes from.

    ``content`` is the result, or with ``is_error`` what went wrong, in words.
    ``replayed`` says that this call did not run the tool; ``record`` is the effect's,
    ``None`` where nothing was recorded.
    """

    content: JsonValue
    is_error: bool = False
    replayed: bool = False
    record: CallRecord | None = None


class ToolRegistry:
    """Runs tools by name, each mutating call once."""

    def __init__(self, ledger: EffectLedger, tools: Iterable[Tool] = ()) -> None:
        self.ledger = ledger
        self._tools: dict[str, Tool] = {}

        for one in tools:
            self.add(one)

    def add(self, one: Tool) -> Tool:
        """Register a tool under its name, which must be new."""
        if one.name in self._tools:
            raise ValueError(f"there is a tool {one.name!r} already")

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
        args: Mapping[str, JsonValue],
        *,
        tool_call_id: str | None = None,
    ) -> ToolOutcome:
        """Run a model's tool call, or replay it.

        An unknown tool, arguments that do not fit the signature or a record, a failure
        and a denial are outcomes with ``is_error``; the first two record nothing. A
        read-only tool is run each time and not recorded. A mutating one is an effect
        of the ledger, named by its validated arguments with defaults filled in, which
        is also what policies see. ``tool_call_id`` is kept beside the record: it
        repeats within a thread, so it never tells two calls apart.

        Raises ``EffectTimeout``, ``EffectErased`` and what the store raises: those
        are for the agent, not for the model.
        """
        known = self._tools.get(name)

        if known is None:
            there = ", ".join(sorted(self._tools)) or "none"
            return ToolOutcome(f"there is no tool {name!r}; there are: {there}", True)

        try:
            valid = known.validated(args)
        except (ValidationError, TypeError) as exc:
            return ToolOutcome(f"arguments of {name!r}: {_problems(exc)}", True)

        if known.side_effects == "read":
            return await _read(known, valid)

        return await self._write(thread_id, known, valid, tool_call_id)

    async def _write(
        self,
        thread_id: str,
        known: Tool,
        valid: dict[str, Any],
        tool_call_id: str | None,
    ) -> ToolOutcome:
        ledger = self.ledger

        try:
            plan = ledger.plan(
                thread_id,
                known.name,
                arguments_json(valid),
                scope=known.scope,
                key_fields=known.key_fields,
                verify=known.verify,
                stale_after=known.stale_after,
                release_failures=known.release_failures,
                tool_call_id=tool_call_id,
            )
        except (SerializationError, PayloadTooLarge) as exc:
            return ToolOutcome(f"arguments of {known.name!r}: {exc}", True)

        try:
            settled = await ledger.settle(
                thread_id,
                plan,
                partial(known.execute, valid),
                wants_attempt=known.wants_effect,
            )
        except EffectDenied as exc:
            return ToolOutcome(str(exc), True)

        try:
            content = settled.value()
        except EffectFailed as exc:
            return ToolOutcome(str(exc), True, settled.replayed, settled.record)
        except Exception as exc:
            if exc is not settled.raised:
                raise

            return ToolOutcome(_told(exc), True, False, settled.record)

        return ToolOutcome(content, False, settled.replayed, settled.record)


async def _read(known: Tool, valid: dict[str, Any]) -> ToolOutcome:
    try:
        return ToolOutcome(plain(await known.execute(valid, None), "result"))
    except Exception as exc:
        return ToolOutcome(_told(exc), True)


def _told(exc: Exception) -> str:
    """Say to the model what went wrong; any exception can be told."""
    message = told(exc)

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
