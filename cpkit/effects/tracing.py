"""What a run reports: log lines, and OpenTelemetry spans if that is installed.

Spans follow the semantic conventions for generative AI, "execute tool"
(opentelemetry.io/docs/specs/semconv/gen-ai). Names that are not part of these start
with ``cpkit.``. Arguments and results may be private, so they are in neither.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self

from cpkit.effects.effect import Effect

try:
    from opentelemetry import trace
except ImportError:  # the extra is not installed
    _tracer = None
else:
    _tracer = trace.get_tracer("cpkit.effects")

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["Trail", "log"]

log = logging.getLogger("cpkit.effects")


class Trail:
    """Reports the steps of one run: in the span of its block, and in the log.

    ``thread_id`` is the agent's thread. ``key`` is that of the effect as it was asked
    for.
    """

    def __init__(self, effect: Effect, thread_id: str) -> None:
        self.key = effect.key
        self._effect = effect
        self._thread_id = thread_id
        self._span: Span | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if _tracer is not None and _has_sdk():
            effect = self._effect
            attributes = {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": effect.tool,
                "gen_ai.conversation.id": self._thread_id,
                "cpkit.effect.key": effect.key,
            }

            if effect.tool_call_id is not None:
                attributes["gen_ai.tool.call.id"] = effect.tool_call_id

            self._span = self._stack.enter_context(
                _tracer.start_as_current_span(
                    f"execute_tool {effect.tool}", attributes=attributes
                )
            )

        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.set("error.type", kind.__qualname__)

        self._stack.__exit__(kind, exc, traceback)

    def note(self, event: str, **facts: str | int) -> None:
        """Report an ordinary step: a span event, and a log line at DEBUG."""
        self._report(logging.DEBUG, event, facts)

    def warn(self, event: str, **facts: str | int) -> None:
        """Report a step that a person may want to look at: logged at WARNING."""
        self._report(logging.WARNING, event, facts)

    def set(self, name: str, fact: str | int) -> None:
        """Set an attribute of the span."""
        if self._span is not None:
            self._span.set_attribute(name, fact)

    def failed(self, error_type: str) -> None:
        """Mark the span as a failed execution."""
        if self._span is not None:
            self._span.set_attribute("error.type", error_type)
            self._span.set_status(trace.StatusCode.ERROR)

    def _report(self, level: int, event: str, facts: dict[str, str | int]) -> None:
        if self._span is not None:
            attributes = {f"cpkit.effect.{name}": fact for name, fact in facts.items()}
            self._span.add_event(f"cpkit.effect.{event.replace(' ', '_')}", attributes)

        if log.isEnabledFor(level):
            said = "".join(f", {name}={fact}" for name, fact in facts.items())
            tool, key = self._effect.tool, self.key[:12]
            thread_id = self._effect.thread_id
            log.log(
                level, "%s %s in thread %r: %s%s", tool, key, thread_id, event, said
            )


def _has_sdk() -> bool:
    """Return whether an SDK is set up; without one, spans are discarded."""
    provider = trace.get_tracer_provider()
    return not isinstance(provider, trace.ProxyTracerProvider)
