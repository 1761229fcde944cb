"""Guards over all tests: no leaks, no blocked event loop, no silent skip in CI."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Generator, Iterator
from inspect import iscoroutinefunction

import pytest

from cpkit.sync import running_loop

PATIENCE = float(os.environ.get("CPKIT_TEST_PATIENCE") or 5)
"""Seconds to wait for threads and tasks to end; those still alive were leaked."""

# The packages that may not block a loop, and the modules through which they could.
PACKAGES = {"cpkit", "cpkit_file", "cpkit_postgres", "cpkit_redis", "cpkit_sqlite"}
WAYS = {"genericpath", "os", "pathlib", "posixpath", "shutil", "tempfile"}
BLOCKING = {
    "fcntl.flock",
    "fcntl.lockf",
    "open",
    "os.listdir",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.scandir",
    "os.truncate",
    "socket.getaddrinfo",
    "sqlite3.connect",
}


def refuse_to_block(event: str, _args: tuple[object, ...]) -> None:
    """Raise where a package does blocking work in a thread that runs an event loop.

    An audit hook (PEP 578): it sees the call itself, so no clock is involved.
    """
    if event not in BLOCKING or running_loop() is None:
        return

    stack = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    modules = [str(frame.f_globals.get("__name__")) for frame in stack]
    place = next(i for i, module in enumerate(modules) if module not in WAYS)
    module = modules[place]

    # The first import of a module reads files, in a loop too; later imports do not.
    if module.partition(".")[0] not in PACKAGES or "importlib._bootstrap" in modules:
        return

    if not module.startswith("cpkit.cli"):
        raise AssertionError(
            f"{event} blocks the event loop, in {module} line {stack[place].f_lineno}"
        )


sys.addaudithook(refuse_to_block)


@pytest.fixture(autouse=True)
def no_thread_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread behind.

    Daemons and asyncio's executor end with the session and the loop.
    """
    if iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("no_task_left")

    before = set(threading.enumerate())
    yield
    left = []

    for thread in set(threading.enumerate()) - before:
        if not thread.daemon and not thread.name.startswith("asyncio_"):
            thread.join(PATIENCE)

            if thread.is_alive():
                left.append(thread)

    assert not left, f"threads left behind: {left}"


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Fail a test that leaves a task behind in its event loop."""
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}

    if left:
        _, left = await asyncio.wait(left, timeout=PATIENCE)

    assert not left, f"tasks left behind: {left}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With ``CI=true``, fail a test that is skipped because the machine lacks a tool.

    The reason of such a skip starts with ``needs``.
    """
    report = yield

    if report.skipped and os.environ.get("CI") and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")

        if reason.startswith("needs "):
            report.outcome = "failed"
            report.longrepr = f"skipped in CI: {reason}"

    return report
