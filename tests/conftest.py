"""Guards over all tests: no leaks, no blocked event loop, no silent skip in CI."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import AsyncIterator, Generator, Iterator
from inspect import iscoroutinefunction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from conformance.slowdown import VARIABLE, slowdown
from cpkit.driver import file_system
from cpkit.sync import running_loop
from tests.servers.postgres import template_folder

LEAKED = 5.0
"""Seconds for threads and tasks to end; those still alive then were leaked."""

LIMIT = 60.0
"""Seconds for a test on an idle machine."""

CPUS = os.cpu_count() or 1

# On a busy machine a first draw, which reads the table of characters, takes a second.
settings.register_profile(
    "tests",
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Start more workers than processors: many tests wait for a disk or a timer."""
    return min(5 * CPUS // 2, 8)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let SIGINT interrupt, and scale all time limits with the load at the start."""
    # A shell starts a command in the background (`make test &`) with SIGINT ignored,
    # and child processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    # Stores warn where the file system is in memory, as /tmp is on many systems.
    if file_system(tempfile.gettempdir()).type == "tmpfs":
        os.environ["TMPDIR"] = tempfile.tempdir = "/var/tmp"

    if not hasattr(config, "workerinput"):
        workers = getattr(config.option, "numprocesses", None) or 1
        crowd = max(1.0, workers / CPUS)
        os.environ.setdefault(VARIABLE, f"{slowdown() * crowd:.1f}")
        slowdown.cache_clear()
        template_folder()  # the workers share it

    # Otherwise each new process reads the lists of all packages for plugins.
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"

    if config.getoption("timeout", None) is None:
        config.option.timeout = LIMIT * slowdown()

    gc.disable()  # until all modules are imported, which takes a quarter less time


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Let as many workers collect at once as there are processors, then the others.

    Those find all modules compiled, which takes two thirds of a first collection.
    """
    worker = getattr(session.config, "workerinput", None)

    if worker is None:
        return (yield)

    shared = Path(session.config.option.basetemp).parent
    turn = int(worker["workerid"].removeprefix("gw")) % CPUS

    with (shared / f"collect-{turn}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Collector, obj: object
) -> list[pytest.Item] | None:
    """Skip classes of long tests in ``make test``, which would leave out each test."""
    marks = getattr(obj, "pytestmark", ()) if isinstance(obj, type) else ()
    is_long = any(mark.name == "long" for mark in marks)
    return [] if is_long and collector.config.option.markexpr == "not long" else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Leave the certificate of the example backend to ``make test-long``.

    Each worker gets an equal part of the list. Its part begins with what may take
    minutes, or waits for long, so that no worker is busy with that at the end.
    """
    for item in items:
        if item.path.name == "test_certificate.py":
            item.add_marker(pytest.mark.long)

    yield  # what is not asked for is left out
    slow = sorted(filter(_limit, items), key=_limit, reverse=True)
    others = [item for item in items if not _limit(item)]
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = [
        item
        for worker in range(workers)
        for part in (slow, others)
        for item in part[
            len(part) * worker // workers : len(part) * (worker + 1) // workers
        ]
    ]


def _limit(item: pytest.Item) -> float:
    """Return the seconds that a test may take, or 0 if it has the usual limit."""
    marker = item.get_closest_marker("timeout")

    if marker:
        return float(marker.args[0])

    params = getattr(getattr(item, "callspec", None), "params", {})
    deadline: float = getattr(params.get("clause"), "deadline", 0)
    return deadline if deadline > LIMIT else 0


def pytest_collection_finish() -> None:
    """Exempt what is imported by now, frameworks included, from garbage collection."""
    gc.freeze()
    gc.enable()


# The packages that may not block a loop, and the modules through which they could.
PACKAGES = {"cpkit", "cpkit_file", "cpkit_mariadb", "cpkit_postgres", "cpkit_redis"}
PACKAGES |= {"cpkit_sqlite"}
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
    # At the end of the interpreter its modules are empty.
    if BLOCKING is None or event not in BLOCKING or running_loop() is None:
        return

    stack = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    modules = [str(frame.f_globals.get("__name__")) for frame in stack]
    packages = [module.partition(".")[0] for module in modules]
    place = next(i for i, package in enumerate(packages) if package not in WAYS)
    module = modules[place]

    # The first import of a module reads files, in a loop too; later imports do not.
    if packages[place] not in PACKAGES or "importlib._bootstrap" in modules:
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
            thread.join(LEAKED * slowdown())

            if thread.is_alive():
                left.append(thread)

    assert not left, f"threads left behind: {left}"


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Fail a test that leaves a task behind in its event loop."""
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}

    if left:
        _, left = await asyncio.wait(left, timeout=LEAKED * slowdown())

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
