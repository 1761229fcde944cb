"""Figures of one handle in memory, for a page or a probe of the same process.

`Tally` has the methods of an OpenTelemetry meter that cpkit uses, without that package.
It counts what ``docs/metrics.md`` lists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime

__all__ = ["Figure", "Tally"]

# Values of one figure that are kept for its median and its 99th percentile.
_KEPT = 1_000


class Figure:
    """The values of one metric with the same attributes.

    ``count``, ``total`` and ``largest`` are of all values; `at` is of the newest ones.
    """

    def __init__(self, attributes: Mapping[str, str]) -> None:
        self.attributes = dict(attributes)
        self.count = 0
        self.total = 0.0
        self.largest = 0.0
        self._newest: deque[float] = deque(maxlen=_KEPT)

    def record(self, value: float) -> None:
        """Add a value."""
        self.count += 1
        self.total += value
        self.largest = max(self.largest, value)
        self._newest.append(value)

    def at(self, fraction: float) -> float:
        """Return a quantile of the newest values: 0.99 is the 99th percentile."""
        ordered = sorted(self._newest)
        return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


class Tally:
    """A meter that keeps its figures in memory; ``since`` is when it began."""

    def __init__(self) -> None:
        self.since = datetime.now(UTC)
        self._figures: dict[tuple[str, ...], Figure] = {}

    def create_histogram(self, name: str, unit: str, description: str) -> _Instrument:
        """Return an instrument; OpenTelemetry's meter has the same method."""
        return _Instrument(self._figures, name)

    create_counter = create_histogram

    def of(self, name: str) -> list[Figure]:
        """Return the figures of a metric, one for each set of attributes."""
        return [one for place, one in self._figures.items() if place[0] == name]


class _Instrument:
    """Records values of one metric."""

    def __init__(self, figures: dict[tuple[str, ...], Figure], name: str) -> None:
        self._figures = figures
        self._name = name

    def record(self, value: float, attributes: Mapping[str, str]) -> None:
        place = self._name, *attributes.values()
        figure = self._figures.get(place)

        if figure is None:
            figure = self._figures[place] = Figure(attributes)

        figure.record(value)

    add = record
