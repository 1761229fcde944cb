"""What a handle measures where the program has a meter provider."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from opentelemetry import metrics as api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from cpkit import Checkpointer, MemoryCheckpointer, VersionConflict, WatchesThreads
from cpkit.driver import SearchingHandle
from cpkit.driver.metrics import OPERATIONS
from cpkit.effects import ApprovalRequest, EffectLedger, EffectTimeout
from cpkit.lease import Lease
from cpkit.worker import Worker


def figures(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    """Return the data points by metric."""
    data: Any = reader.get_metrics_data()
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_every_operation_that_is_measured_exists() -> None:
    """A handle has only the methods that its store supports, so others are skipped."""
    assert [one for one in OPERATIONS if not hasattr(SearchingHandle, one)] == []


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


async def test_a_worker_measures_how_long_requests_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oldest undecided request, and the oldest decision without a run."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(api, "get_meter_provider", lambda: provider)
    allowed = asyncio.Event()

    async def agent(cp: Checkpointer[Any], lease: Lease) -> None:
        if not allowed.is_set():
            raise RuntimeError("not yet")

    def since(request: ApprovalRequest) -> float:
        return (datetime.now(UTC) - request.requested_at).total_seconds()

    def gauges() -> list[float]:
        found = figures(reader)
        names = ("undecided", "pending")
        points = [found[f"cpkit.requests.{name}.oldest"] for name in names]
        assert [one.attributes for (one,) in points] == [{"cpkit.store": "memory"}] * 2
        return [one.value for (one,) in points]

    async with MemoryCheckpointer[Any]() as cp:
        ledger = EffectLedger(cp, requires_approval=lambda _: True, approval_timeout=0)
        worker = Worker(cp, agent)
        assert await worker.run_due() == 0
        assert gauges() == [0.0, 0.0]

        for thread in ("first", "second"):
            with pytest.raises(EffectTimeout):
                await ledger.begin(thread, "pay", {})

        first, second = await ledger.requests()
        assert await worker.run_due() == 0
        undecided, pending = gauges()
        assert 0 < undecided <= since(first)
        assert (pending, worker.health.oldest_undecided) == (0.0, undecided)

        assert await ledger.deny(first.key)
        assert await worker.run_due() == 1
        undecided, pending = gauges()
        # The run of the first request failed, so that its decision still waits.
        assert 0 < undecided <= since(second)
        assert 0 < pending == worker.health.oldest_decided

        allowed.set()
        worker = Worker(cp, agent)
        assert await worker.run_due() == 1
        assert worker.health.oldest_decided is None
        assert gauges()[1] == 0.0

    provider.shutdown()


async def test_without_a_provider_nothing_is_in_the_way() -> None:
    """A handle's methods are then those of its class."""
    async with MemoryCheckpointer[Any]() as cp:
        assert "append" not in vars(cp)
        assert cp._commits.observers == []
