"""What is kept beside the writes: secrets, stated limits, damaged rows, closing."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from conformance.case import Case, raises
from conformance.clause import Level, clause
from conformance.failure import Failure
from conformance.harness import Harness
from cpkit import BackendUnavailable, CheckpointerError, CorruptThread

SECRET = "s3cret-of-the-suite"

LOOPS, APPENDS = 4, 40
"""Event loops that write to one thread at once, and the appends of each."""

SWITCH = 1e-5
"""Seconds until Python's threads take turns: each write is interrupted often."""


def _with_password(harness: Harness) -> Harness | None:
    """Return a harness of the same server with another user and a password."""
    url = getattr(harness, "url", None)

    if not isinstance(url, str) or not urlsplit(url).hostname:
        return None

    place = urlsplit(url)
    host = place.netloc.rpartition("@")[2]
    changed = place._replace(netloc=f"cpkit:{SECRET}@{host}").geturl()
    made: Any = harness

    try:
        found: Harness = replace(made, url=changed)
    except TypeError:  # it is not a dataclass
        return None

    return found


@clause("handle.tells-no-password", deadline=40)
async def tells_no_password(case: Case) -> None:
    """No error of a handle shows the password of its URL."""
    harness = _with_password(case.harness)

    if harness is None or harness.server_address() is None:
        case.skip("the harness has no URL that names a server")
        return

    told: list[BaseException] = []

    try:
        async with harness.open() as cp:
            await cp.load(case.id())

        await cp.load(case.id())
    except CheckpointerError as exc:  # Closed, or the server refuses the user
        told.append(exc)

    assert told, "a closed handle raises Closed"
    error: BaseException | None = told[0]

    while error is not None:
        if SECRET in f"{error}{error!r}":
            raise Failure("no password in an error", f"{type(error).__name__}: {error}")

        error = error.__cause__


@clause("limits.holds-what-it-states", level=Level.BOUNDED, deadline=120)
async def holds_what_it_states(case: Case) -> None:
    """An append of the largest size that the handle accepts is stored whole."""
    limits = getattr(case.cp, "limits", None)

    if limits is None:
        case.skip("the handle does not state its limits")
        return

    thread, left, size = case.id(), limits.max_append, limits.max_value
    messages: list[dict[str, str]] = []

    while left >= len('{"x":""}'):
        messages.append({"x": "x" * (min(left, size) - len('{"x":""}'))})
        left -= min(left, size)

    version = await case.cp.append(thread, messages)
    assert version == len(messages)
    loaded = await case.cp.load(thread)
    assert loaded is not None
    sizes = [len(message["x"]) for message in loaded.messages]
    assert sizes == [len(message["x"]) for message in messages]


@clause("damage.is-told", "damage")
async def damage_is_told(case: Case) -> None:
    """A damaged row raises CorruptThread, and does not stop other threads."""
    thread, other = case.id("damaged"), case.id("other")

    for one in (thread, other):
        await case.cp.append(one, [{"n": 1}, {"n": 2}])

    await case.harness.damage(thread)

    for _ in range(2):
        with raises(CorruptThread, "a load of a damaged thread"):
            await case.cp.load(thread)

        with suppress(CorruptThread):  # a write need not read the row
            await case.cp.append(thread, [{"n": 3}])

    async with case.open() as later:
        with raises(CorruptThread, "a load by another handle"):
            await later.load(thread)

    assert await case.cp.append(other, [{"n": 3}]) == 3
    loaded = await case.cp.load(other)
    assert loaded is not None
    assert loaded.messages == [{"n": 1}, {"n": 2}, {"n": 3}]


@clause("cancel.close-waits-for-threads", level=Level.CONCURRENT, deadline=60)
async def close_waits_for_threads(case: Case) -> None:
    """When a handle is closed, its threads have ended, those of cancelled reads too."""
    thread = case.id()
    await case.cp.append(thread, [{"n": n, "text": "x" * 100} for n in range(3000)])

    async with case.open():
        pass  # what a module keeps of its first use

    before = set(threading.enumerate())

    for _ in range(case.times(3)):
        async with case.open() as cp:
            await cp.load(thread)
            reads = [asyncio.create_task(cp.load(thread)) for _ in range(8)]
            await asyncio.sleep(0.001)

            for read in reads:
                read.cancel()

            await asyncio.wait(reads)

        left = [
            one.name
            for one in set(threading.enumerate()) - before
            if not one.name.startswith("asyncio_")  # the event loop's
        ]
        assert not left, "after the handle was closed"


@clause(
    "concurrent.handles-append-at-once", "handles", level=Level.CONCURRENT, deadline=90
)
async def handles_append_at_once(case: Case) -> None:
    """Appends and merges of handles in several threads are all there."""
    thread, count = case.id(), case.times(APPENDS)
    begin = threading.Barrier(LOOPS)

    async def use(loop: int) -> list[int]:
        async with case.open() as cp:
            await asyncio.to_thread(begin.wait, 30)
            versions = []

            for n in range(count):
                versions.append(await cp.append(thread, [{"by": loop, "n": n}]))
                await cp.save_extra(thread, {f"{loop}.{n}": n})

            return versions

    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)

    try:
        answers = await asyncio.gather(
            *(asyncio.to_thread(asyncio.run, use(loop)) for loop in range(LOOPS))
        )
    except BackendUnavailable as exc:
        raise Failure("appends that wait for each other", f"{exc}") from exc
    finally:
        sys.setswitchinterval(interval)

    loaded = await case.cp.load(thread)
    assert loaded is not None
    versions = sorted(version for some in answers for version in some)
    assert versions == list(range(1, LOOPS * count + 1))
    assert len(loaded.extra) == LOOPS * count

    for loop, some in enumerate(answers):
        for n, version in enumerate(some):
            assert loaded.messages[version - 1] == {"by": loop, "n": n}
