"""Tools: functions that a model may call, with a declared side effect."""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, partial
from typing import Any, Literal, cast, overload

from pydantic import BaseModel, RootModel, TypeAdapter
from pydantic_core import ArgsKwargs, to_jsonable_python

from cpkit.canonical import canonical_json
from cpkit.effects.effect import Effect, Verify
from cpkit.effects.records import Scope
from cpkit.effects.spec import LEDGER_DEFAULT, EffectSpec, LedgerDefault
from cpkit.errors import SerializationError
from cpkit.records import JsonValue

__all__ = ["Tool", "tool"]

SideEffects = Literal["read", "write"]


@dataclass(frozen=True)
class Tool:
    """A function that a model may call, with what it does to the world.

    The function is sync or async, and takes its arguments by name. One parameter may be
    annotated `Effect`. The model does not see this parameter: the ledger passes the
    effect, with the key to pass downstream and the attempt. The result is JSON, or a
    value that pydantic can write as JSON.

    A sync function runs in a worker thread, so that it does not block the event loop.
    Cancelling its run does not stop that thread.

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

        if not self.name:
            object.__setattr__(self, "name", self.function.__name__)

        unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)

        for parameter in self._signature.parameters.values():
            if parameter.kind in unnamed:
                raise TypeError(
                    f"tool {self.name!r}: a model passes arguments by name, and "
                    f"parameter {parameter.name!r} cannot be passed by name"
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
            result = await asyncio.to_thread(call)

            if inspect.isawaitable(result):
                result = await result

        try:
            return to_jsonable_python(result)
        except Exception as exc:
            # The effect has happened, so this must not count as a failure of the tool.
            raise SerializationError(("result",), str(exc)) from exc

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


def arguments_json(valid: Mapping[str, Any]) -> dict[str, JsonValue]:
    """Return validated arguments as pydantic writes them, but with sets sorted.

    The order of a set differs between processes (``PYTHONHASHSEED``). Unsorted, the
    same call would be another effect in each process.
    """
    arguments: dict[str, JsonValue] = _sorted(valid, to_jsonable_python(valid))
    return arguments


def _sorted(value: object, written: Any) -> Any:
    """Return ``written``, the JSON of ``value``, with the members of sets sorted."""
    if isinstance(value, RootModel):
        return _sorted(value.root, written)

    if isinstance(written, list) and isinstance(value, (list, tuple, set, frozenset)):
        members = [_sorted(*pair) for pair in zip(value, written, strict=True)]
        ordered = isinstance(value, (list, tuple))
        return members if ordered else sorted(members, key=canonical_json)

    if isinstance(written, dict):
        for name, inner in _members(value, written):
            written[name] = _sorted(inner, written[name])

    return written


def _members(value: object, written: dict[str, Any]) -> Iterable[tuple[str, object]]:
    """Return the members of ``value`` that are in its JSON, with their JSON names."""
    if isinstance(value, Mapping):
        return zip(list(written), value.values(), strict=False)

    if isinstance(value, BaseModel):
        named = [
            (field.serialization_alias or name, getattr(value, name))
            for name, field in type(value).model_fields.items()
        ]
    elif is_dataclass(value):
        named = [(field.name, getattr(value, field.name)) for field in fields(value)]
    else:
        named = []

    return [(name, inner) for name, inner in named if name in written]
