"""Metrics of a handle, by OpenTelemetry where a program has set it up.

``docs/metrics.md`` lists them. A handle asks once, when it opens. A program without a
meter provider pays nothing: OpenTelemetry is not imported here, and no method is
wrapped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from cpkit.driver.writes import Conflict, Write

__all__ = ["OPERATIONS", "Metrics", "provided_meter"]

OPERATIONS = (
    "load append save_extra record_issued record_result find_completed read load_range "
    "list_threads list_calls find_call delete_thread trim dump_thread restore_thread "
    "search_threads"
).split()


class Metrics:
    """The instruments of one handle; ``scheme`` is an attribute of each measurement."""

    def __init__(self, meter: Any, scheme: str) -> None:
        self._store = {"cpkit.store": scheme}
        self._duration = meter.create_histogram(
            "cpkit.operation.duration", "s", "Time of one operation of a handle"
        )
        self._batch = meter.create_histogram(
            "cpkit.commit.writes", "{write}", "Writes in one commit"
        )
        self._conflicts = meter.create_counter(
            "cpkit.conflicts", "{conflict}", "Writes refused for the thread's version"
        )
        self._wake = meter.create_histogram(
            "cpkit.watch.wake", "s", "Time from a notification to the wake-up"
        )

    def time_operations(self, handle: object) -> None:
        """Put a clock around the methods of this handle."""
        for operation in OPERATIONS:
            if method := getattr(handle, operation, None):
                setattr(handle, operation, partial(self._timed, operation, method))

    def committed(self, batch: Sequence[Write], outcomes: Sequence[object]) -> None:
        """Record the size of a commit, and its conflicts."""
        self._batch.record(len(batch), self._store)

        if conflicts := sum(isinstance(one, Conflict) for one in outcomes):
            self._conflicts.add(conflicts, self._store)

    def woken(self, seconds: float) -> None:
        """Record how long after a notification a watcher was woken."""
        self._wake.record(seconds, self._store)

    async def _timed(self, operation: str, method: Any, *args: Any, **kw: Any) -> Any:
        """Call the method, and record how long it took."""
        attributes = {**self._store, "cpkit.operation": operation}
        started = time.perf_counter()

        try:
            return await method(*args, **kw)
        except BaseException as exc:
            attributes["error.type"] = type(exc).__name__
            raise
        finally:
            self._duration.record(time.perf_counter() - started, attributes)


def provided_meter() -> Any | None:
    """Return the meter of the program's provider; ``None`` if it has not set up one."""
    api: Any = sys.modules.get("opentelemetry.metrics")
    provider = api and api.get_meter_provider()
    is_real = not type(provider).__module__.startswith("opentelemetry.metrics")
    # The API's own providers discard everything.
    return provider.get_meter("cpkit") if provider and is_real else None
