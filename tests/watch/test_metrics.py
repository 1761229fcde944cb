"""What a handle measures where the program has a meter provider."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import metrics as api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from cpkit import MemoryCheckpointer, VersionConflict, WatchesThreads


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
        assert cp._metrics is None
