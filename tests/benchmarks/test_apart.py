"""What is measured in processes of their own."""

from __future__ import annotations

import os
import shutil

import pytest

from benchmarks.apart import append_cost, crowd_rate, import_times, load_memory
from benchmarks.place import Place
from benchmarks.roster import FLOOR, OURS, entry

needs_proc = pytest.mark.skipif(
    not os.path.exists("/proc/self/io"), reason="needs /proc/self/io"
)


@needs_proc
@pytest.mark.parametrize("driver", ["sqlite", "postgres", "file"])
def test_an_append_is_a_sync_and_a_message_and_little_more(
    place: Place, driver: str
) -> None:
    """Counted as the difference of two runs, one of them without the appends."""
    cost = append_cost(entry(driver, OURS).make(place), place, 40)

    assert cost.bytes is not None
    assert 1_000 < cost.bytes < 40_000

    if driver != "postgres" and shutil.which("strace"):
        assert cost.fsyncs == pytest.approx(1, abs=0.2)


@needs_proc
@pytest.mark.parametrize("driver", ["sqlite"])
def test_the_peak_is_that_of_the_load_alone(place: Place) -> None:
    """What this process has in memory does not count."""
    ballast = bytearray(os.urandom(1024)) * 200_000
    growth = load_memory(entry("sqlite", FLOOR).make(place), place, 2_000)

    assert 2_000_000 < growth < 100_000_000 < len(ballast)


@pytest.mark.parametrize("driver", ["sqlite"])
def test_four_processes_append_to_one_store(place: Place) -> None:
    """They start together, and every one finds all that it has written."""
    assert crowd_rate(entry("sqlite", OURS).make(place), place, 0.2) > 0


def test_imports_are_timed_in_fresh_processes() -> None:
    """Each takes some time, however often it was imported here."""
    assert all(took > 0 for took in import_times(1).values())
