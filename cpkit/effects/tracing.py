"""What a run reports: log lines, and OpenTelemetry spans if that is installed.

Spans follow the semantic conventions for generative AI, "execute tool"
(opentelemetry.io/docs/specs/semconv/gen-ai). Names that are not part of these start
with ``cpkit.``. Arguments and results may be private, so they are in neither.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from cpkit.effects.effect import Effect
from cpkit.effects.errors import EffectFailed
from cpkit.effects.records import exception_type

try:
    from opentelemetry import trace
except ImportError:  # the extra is not installed
    _tracer = None
else:
    _tracer = trace.get_tracer("cpkit.effects")

__all__ = ["log", "mark", "note", "traced", "warn"]

log = logging.getLogger("cpkit.effects")


@contextmanager
def traced(effect: Effect) -> Iterator[None]:
    """Run the block in the span of an effect, if an SDK takes spans."""
    if _tracer is None or not _has_sdk():
        yield
        return

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
            yield
        except BaseException as exc:
            span.set_attribute("error.type", type(exc).__qualname__)
            raise


def mark(error: Exception | None, *, replayed: bool) -> None:
    """Say on the current span whether its effect was replayed, and how it failed."""
    if _tracer is None:
        return

    span = trace.get_current_span()

    if replayed:
        span.set_attribute("cpkit.effect.replayed", True)

    if error is not None:
        recorded = error.error_type if isinstance(error, EffectFailed) else None
        span.set_attribute("error.type", recorded or exception_type(error))
        span.set_status(trace.StatusCode.ERROR)


def note(effect: Effect, step: str, **facts: str | int) -> None:
    """Report an ordinary step of a run: a span event, and a log line at DEBUG."""
    _report(logging.DEBUG, effect, step, facts)


def warn(effect: Effect, step: str, **facts: str | int) -> None:
    """Report a step that a person may want to look at: logged at WARNING."""
    _report(logging.WARNING, effect, step, facts)


def _report(level: int, effect: Effect, step: str, facts: dict[str, str | int]) -> None:
    if _tracer is not None:
        attributes = {f"cpkit.effect.{name}": fact for name, fact in facts.items()}
        name = f"cpkit.effect.{step.replace(' ', '_')}"
        trace.get_current_span().add_event(name, attributes)

    if log.isEnabledFor(level):
        said = "".join(f", {name}={fact}" for name, fact in facts.items())
        place = effect.tool, effect.key[:12], effect.thread_id
        log.log(level, "%s %s in thread %r: %s%s", *place, step, said)


def _has_sdk() -> bool:
    """Return whether an SDK is set up; without one, spans are discarded."""
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
