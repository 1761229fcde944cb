"""The guards in ``conftest.py``: each one fails the tests that it is meant to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.slowdown import VARIABLE

ROOT = Path(__file__).parents[2]

TESTS = """
import asyncio, threading
import pytest

# The guards recognize the packages by the name of the module.
driver = {"__name__": "cpkit_sqlite.somewhere"}
exec("import os, pathlib\\ndef listing(): os.listdir('.')\\n"
     "def reading(): pathlib.Path(place).read_text()", driver)
driver["place"] = __file__
stop = threading.Event()

def test_fails_for_a_thread():
    threading.Thread(target=stop.wait).start()

def test_passes_after():
    stop.set()

async def test_fails_for_a_task():
    global task
    task = asyncio.create_task(asyncio.sleep(1000))

async def test_fails_for_listing_in_the_loop():
    driver["listing"]()

async def test_fails_for_reading_in_the_loop():
    driver["reading"]()

async def test_passes_in_a_worker_thread():
    await asyncio.to_thread(driver["reading"])

async def test_passes_for_a_tests_own_file():
    open(__file__).close()

def test_fails_for_a_missing_tool_in_ci():
    pytest.skip("needs a moon")

def test_skips_for_another_reason():
    pytest.skip("the store has no server")
"""


@pytest.mark.long
def test_each_guard_fails_the_tests_that_it_is_meant_to(tmp_path: Path) -> None:
    """A leak, a blocked loop and a silent skip fail; correct tests pass."""
    (tmp_path / "test_bad.py").write_text(TESTS)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "tests.conftest"]
        + [f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={tmp_path}"]
        + ["-p", "no:cacheprovider", str(tmp_path / "test_bad.py")],
        cwd=ROOT,
        env={**os.environ, "CI": "true", VARIABLE: "0.04"},
        capture_output=True,
        text=True,
    )
    # A test can pass and then fail in its teardown: the last outcome counts.
    verdict = dict(
        line.split("::")[1].split()[:2]
        for line in ran.stdout.splitlines()
        if "test_bad.py::" in line and not line.startswith(("ERROR", "FAILED"))
    )
    assert verdict == {
        "test_fails_for_a_thread": "ERROR",
        "test_passes_after": "PASSED",
        "test_fails_for_a_task": "ERROR",
        "test_fails_for_listing_in_the_loop": "FAILED",
        "test_fails_for_reading_in_the_loop": "FAILED",
        "test_passes_in_a_worker_thread": "PASSED",
        "test_passes_for_a_tests_own_file": "PASSED",
        "test_fails_for_a_missing_tool_in_ci": "FAILED",
        "test_skips_for_another_reason": "SKIPPED",
    }, ran.stdout
