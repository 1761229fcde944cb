"""What a run reports: log lines, and OpenTelemetry spans if that is installed.

Spans follow the semantic conventions for generative AI, "execute tool"
(opentelemetry.io/docs/specs/semconv/gen-ai). Names that are not part of these start
with ``cpkit.``. Arguments and results may be private, so they are in neither.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any

from cpkit.effects.effect import Effect, EffectPlan
from cpkit.effects.errors import EffectFailed
from cpkit.effects.records import exception_type

try:
    from opentelemetry import trace
except ImportError:  # the extra is not installed
    _tracer = None
else:
    _tracer = trace.get_tracer("cpkit.effects")

__all__ = ["Similar", "log", "note", "traced", "warn"]

log = logging.getLogger("cpkit.effects")

_REMEMBERED = 1_000

_PASSING = re.compile(
    r"[0-9a-fA-F]{8}-?([0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}"  # a UUID
    r"|[0-9a-fA-F]{16,}"  # a random number in hex
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d.*"  # a time
)


async def traced(effect: Effect, run: Awaitable[Any]) -> Any:
    """Return the result of an effect's run, in a span if an SDK takes spans."""
    if _tracer is None or not _has_sdk():
        return await run

    attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": effect.tool,
        "gen_ai.conversation.id": effect.thread_id,
        "cpkit.effect.key": effect.key,
    }

    if effect.tool_call_id is not None:
        attributes["gen_ai.tool.call.id"] = effect.tool_call_id

    name = f"execute_tool {effect.tool}"

    with _tracer.start_as_current_span(name, attributes=attributes) as span:
        try:
            result = await run
        except BaseException as exc:
            span.set_attribute("error.type", type(exc).__qualname__)
            raise

        if result.replayed:
            span.set_attribute("cpkit.effect.replayed", True)

        if (error := result.error) is not None:
            recorded = error.error_type if isinstance(error, EffectFailed) else None
            span.set_attribute("error.type", recorded or exception_type(error))
            span.set_status(trace.StatusCode.ERROR)

        return result


def note(
    effect: Effect, step: str, *, level: int = logging.DEBUG, **facts: str | int
) -> None:
    """Report a step of a run: a span event, and a log line."""
    if _tracer is not None:
        attributes = {f"cpkit.effect.{name}": fact for name, fact in facts.items()}
        name = f"cpkit.effect.{step.replace(' ', '_')}"
        trace.get_current_span().add_event(name, attributes)

    if log.isEnabledFor(level):
        said = "".join(f", {name}={fact}" for name, fact in facts.items())
        place = effect.tool, effect.key[:12], effect.thread_id
        log.log(level, "%s %s in thread %r: %s%s", *place, step, said)


warn = partial(note, level=logging.WARNING)
"""Reports a step that a person may want to look at."""


def _has_sdk() -> bool:
    """Return whether an SDK is set up; without one, spans are discarded."""
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


class Similar:
    """Remembers the arguments of the last effect of each tool in each thread."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], Mapping[str, Any]] = {}

    def note(self, plan: EffectPlan) -> None:
        """Warn if only times and random values tell an effect from the one before."""
        if plan.kind != "arguments":
            return

        if len(self._last) >= _REMEMBERED:
            self._last.clear()

        place, new = (plan.effect.thread_id, plan.effect.tool), plan.effect.args
        old = self._last.get(place, new)
        self._last[place] = new
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]

        if names and all(_is_passing(one.get(n)) for n in names for one in (old, new)):
            log.warning(
                "%s ran twice in thread %r with arguments that differ only in %s: a "
                "time or a random value makes each run another effect; name the effect "
                "with key_fields=",
                *(plan.effect.tool, plan.effect.thread_id, ", ".join(names)),
            )


def _is_passing(value: object) -> bool:
    if isinstance(value, str):
        return _PASSING.fullmatch(value) is not None

    # Seconds, or milliseconds, since 1970: from 2001 to 2286.
    return isinstance(value, (int, float)) and (
        1e9 < value < 1e10 or 1e12 < value < 1e13
    )
