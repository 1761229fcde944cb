"""The registry that runs a model's tool calls, each mutating call once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError

from cpkit.effects.effect import NoEffect
from cpkit.effects.errors import EffectDenied, EffectFailed
from cpkit.effects.ledger import EffectLedger
from cpkit.effects.records import copy_json, exception_message
from cpkit.effects.spec import plan_effect
from cpkit.effects.tools import Tool
from cpkit.errors import PayloadTooLarge, SerializationError
from cpkit.records import CallRecord, JsonValue

__all__ = ["ToolOutcome", "ToolRegistry"]


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

    def __init__(self, ledger: EffectLedger, tools: Iterable[Tool] = ()) -> None:
        self.ledger = ledger
        self._tools: dict[str, Tool] = {}

        for tool in tools:
            self.add(tool)

    def add(self, one: Tool) -> Tool:
        """Register a tool under its name, which must be new."""
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
        args: Mapping[str, JsonValue],
        *,
        tool_call_id: str | None = None,
    ) -> ToolOutcome:
        """Run a model's tool call, or replay it.

        These are outcomes with ``is_error``: an unknown tool, arguments that fit
        neither the signature nor a record, a failure, and a denial. The first two
        record nothing.

        A read-only tool runs each time and is not recorded. A mutating tool is an
        effect of the ledger. Its validated arguments, with defaults filled in, name the
        effect, and policies see them. ``tool_call_id`` is kept with the record only:
        models repeat it within a thread, so it does not tell two calls apart.

        Raises ``EffectTimeout``, ``EffectErased`` and what the store raises. These
        errors are for the agent, not for the model.
        """
        tool = self._tools.get(name)

        if tool is None:
            known = ", ".join(sorted(self._tools)) or "none"
            return ToolOutcome(f"unknown tool {name!r}; known tools: {known}", True)

        try:
            valid = tool.validated(args)
        except (ValidationError, TypeError) as exc:
            return ToolOutcome(f"arguments of {name!r}: {_problems(exc)}", True)

        if tool.side_effects == "read":
            return await _read(tool, valid)

        return await self._write(thread_id, tool, valid, tool_call_id)

    async def _write(
        self,
        thread_id: str,
        tool: Tool,
        valid: dict[str, Any],
        tool_call_id: str | None,
    ) -> ToolOutcome:
        ledger = self.ledger

        try:
            spec = tool.spec(thread_id, valid, tool_call_id)
            plan = plan_effect(spec, ledger.settings)
        except (SerializationError, PayloadTooLarge) as exc:
            return ToolOutcome(f"arguments of {tool.name!r}: {exc}", True)

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
