"""The measurements in separate processes."""

from __future__ import annotations

import os
import shutil

import pytest

from benchmarks.place import Place
from benchmarks.processes import append_cost, crowd_rate, import_times, load_memory
from benchmarks.roster import CPKIT, FLOOR, entry
from benchmarks.wake import crowd_figures, decision_times
from cpkit import open_checkpointer

pytestmark = pytest.mark.long

needs_proc = pytest.mark.skipif(
    not os.path.exists("/proc/self/io"), reason="needs /proc/self/io"
)


@needs_proc
@pytest.mark.parametrize("driver", ["sqlite", "postgres", "file"])
def test_an_append_costs_one_sync_and_little_more_than_its_message(
    place: Place, driver: str
) -> None:
    """The cost is the difference of two runs, one of them without appends."""
    cost = append_cost(entry(driver, CPKIT).make(place), place, 40)

    assert cost.bytes is not None
    assert 900 < cost.bytes < 40_000

    if driver != "postgres" and shutil.which("strace"):
        assert cost.fsyncs == pytest.approx(1, abs=0.2)


@needs_proc
@pytest.mark.parametrize("driver", ["sqlite"])
def test_the_peak_is_that_of_the_load(place: Place) -> None:
    """The memory of the parent process does not count."""
    ballast = bytearray(os.urandom(1024)) * 200_000
    growth = load_memory(entry("sqlite", FLOOR).make(place), place, 2_000)

    assert 2_000_000 < growth < 100_000_000 < len(ballast)


@pytest.mark.parametrize("driver", ["sqlite"])
def test_four_processes_append_to_one_store(place: Place) -> None:
    """They start together, and each one loads all that it has appended."""
    assert crowd_rate(entry("sqlite", CPKIT).make(place), place, 0.2) > 0


def test_imports_are_timed_in_fresh_processes() -> None:
    """Each import takes time, although this process has the modules already."""
    assert all(took > 0 for took in import_times(1).values())


@pytest.mark.parametrize("driver", ["sqlite"])
async def test_a_decision_and_a_crowd_are_measured(place: Place) -> None:
    """The handler starts after the decision; the crowd waits with few operations."""
    url = f"sqlite:///{place.file('wake.db')}"

    async with open_checkpointer(url):
        pass

    took = await decision_times(url, 3)
    assert len(took) == 3
    assert min(took) > 0
    found = await crowd_figures(url, 50)
    assert found.keys() == {"operations a second", "last after first ms"}
