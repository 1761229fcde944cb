"""What a handle measures where the program has a meter provider."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import metrics as api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from cpkit import MemoryCheckpointer, VersionConflict, WatchesThreads
from cpkit.driver.tally import Figure


def figures(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    """Return the data points by metric."""
    data: Any = reader.get_metrics_data()
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


async def test_a_handle_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Durations by operation and error, commits, conflicts and wake-ups."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    # The global provider can be set only once in a process.
    monkeypatch.setattr(api, "get_meter_provider", lambda: provider)

    async with MemoryCheckpointer[Any]() as cp:
        assert isinstance(cp, WatchesThreads)

        async with cp.watch("t") as changes:
            await cp.append("t", [{"n": 1}])
            assert await anext(changes) == "t"

        with pytest.raises(VersionConflict):
            await cp.append("t", [{"n": 1}], expected_version=7)

    found = figures(reader)
    operations = {
        (point.attributes["cpkit.operation"], point.attributes.get("error.type"))
        for point in found["cpkit.operation.duration"]
    }
    assert operations == {("append", None), ("append", "VersionConflict")}
    assert [point.sum for point in found["cpkit.commit.writes"]] == [2]
    assert [point.value for point in found["cpkit.conflicts"]] == [1]
    assert [point.count for point in found["cpkit.watch.wake"]] == [1]
    assert found["cpkit.conflicts"][0].attributes == {"cpkit.store": "memory"}
    provider.shutdown()


async def test_without_a_provider_nothing_is_in_the_way() -> None:
    """A handle's methods are then those of its class."""
    async with MemoryCheckpointer[Any]() as cp:
        assert "append" not in vars(cp)
        assert cp._metrics == []


async def test_a_tally_counts_without_a_provider() -> None:
    """From the first call on, with the same names and attributes."""
    cp = MemoryCheckpointer[Any]()
    tally = cp.tally()
    assert cp.tally() is tally

    async with cp:
        assert isinstance(cp, WatchesThreads)

        async with cp.watch("t") as changes:
            await cp.append("t", [{"n": 1}])
            assert await anext(changes) == "t"

        with pytest.raises(VersionConflict):
            await cp.append("t", [{"n": 1}], expected_version=7)

    found = {
        (one.attributes["cpkit.operation"], one.attributes.get("error.type")): one
        for one in tally.of("cpkit.operation.duration")
    }
    assert {name: one.count for name, one in found.items()} == {
        ("append", None): 1,
        ("append", "VersionConflict"): 1,
    }
    took = found["append", None]
    assert 0 < took.at(0.5) == took.at(0.99) == took.largest == took.total
    assert [one.total for one in tally.of("cpkit.commit.writes")] == [2]
    assert [one.total for one in tally.of("cpkit.conflicts")] == [1]
    assert [one.count for one in tally.of("cpkit.watch.wake")] == [1]


def test_a_figure_keeps_its_newest_values() -> None:
    """Quantiles are of the last thousand values; the largest is of all."""
    figure = Figure({})

    for value in [5_000, *range(1_000)]:
        figure.record(value)

    assert (figure.at(0.5), figure.at(0.99), figure.at(1.0)) == (500, 990, 999)
    assert (figure.count, figure.largest) == (1_001, 5_000)
