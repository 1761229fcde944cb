"""Waiting for another process, for a change, and for answers that were lost.

All times are those of the event loop's monotonic clock: processes share no clock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from math import inf
from types import TracebackType
from typing import Any, Self, TypeVar

from cpkit.driver.backoff import backoff_pauses
from cpkit.errors import BackendUnavailable
from cpkit.protocol import WatchesThreads

__all__ = [
    "STALE_AFTER",
    "StaleDetector",
    "Wakeups",
    "check_interval",
    "check_limit",
    "retry_unclear",
    "run_shielded",
]

log = logging.getLogger("cpkit.effects")

T = TypeVar("T")

STALE_AFTER = 15.0
"""Seconds without a heartbeat after which a holder counts as dead, by default."""

RETRY_FOR = 30.0
"""Seconds for which an operation is repeated whose answer was lost."""

_NOT_READ = object()

_REST = 9
"""The rest after a look, as a multiple of its time: looks take a tenth of the time."""

_LONGEST_REST = 0.25
"""Seconds after which a changed thread is looked at, however many waiters there are."""


def check_interval(name: str, seconds: float) -> None:
    """Raise ``ValueError`` unless the seconds are positive and finite."""
    if not 0 < seconds < inf:
        raise ValueError(f"{name} must be positive and finite, not {seconds!r:.80}")


def check_limit(name: str, seconds: float | None) -> None:
    """Raise ``ValueError`` unless the seconds are ``None``, or finite and at least 0.

    Without this check a wait for ``nan`` seconds would never end.
    """
    if seconds is not None and not 0 <= seconds < inf:
        raise ValueError(
            f"{name} must be finite and at least 0, or None for no limit, not "
            f"{seconds!r:.80}"
        )


class StaleDetector:
    """Decides whether a heartbeat stayed the same for ``stale_after`` seconds.

    The observer's own clock alone counts. Each pause between two reads counts for at
    most a quarter of ``stale_after``. So an observer that was paused, or whose clock
    jumped, reads the heartbeat three more times before it calls a holder stale.
    """

    def __init__(self, stale_after: float) -> None:
        self.stale_after = stale_after
        self.changed = False
        """Whether the heartbeat changed since the first read."""
        self._heartbeat: object = _NOT_READ
        self._read_at = 0.0
        self._unchanged_for = 0.0

    @property
    def longest_pause(self) -> float:
        """The seconds between two reads that count; a longer pause gains nothing."""
        return self.stale_after / 4

    async def is_stale(self, read: Callable[[], Awaitable[object]]) -> bool:
        """Read the heartbeat; return whether it was unchanged for long enough.

        The time that surely passed without a new heartbeat is the time from the end of
        one read to the start of the next.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        heartbeat = await read()

        if heartbeat != self._heartbeat:
            self.changed = self._heartbeat is not _NOT_READ
            self._heartbeat = heartbeat
            self._unchanged_for = 0.0
        else:
            self._unchanged_for += min(started - self._read_at, self.longest_pause)

        self._read_at = clock()
        return self._unchanged_for >= self.stale_after


class Wakeups:
    """Waits for changes of a thread while its block runs: by `watch`, or by time.

    A wake-up is a hint: the caller looks at the store, and waits again if nothing that
    matters has changed. A change between two waits wakes the next wait.
    """

    def __init__(self, cp: Any, thread_id: str) -> None:
        self._watch = cp.watch(thread_id) if isinstance(cp, WatchesThreads) else None
        self._changed = asyncio.Event()
        self._waited_until = 0.0
        self._pump: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._watch is not None:
            changes = await self._watch.__aenter__()
            self._pump = asyncio.create_task(self._collect(changes))
            self._waited_until = asyncio.get_running_loop().time()

        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._watch is None or self._pump is None:
            return

        self._pump.cancel()

        try:
            await asyncio.wait([self._pump])
        finally:
            await self._watch.__aexit__(kind, exc, traceback)

    async def wait(self, pause: float, longest: float, waiters: int = 1) -> None:
        """Wait for a change, and rest if the look before took long.

        With a watch it waits for at most ``longest`` seconds and a rest of 0.25 s;
        without a working one, for ``pause`` seconds. The rests of all ``waiters`` leave
        the store time for others.
        """
        if self._pump is None or self._pump.done():
            await asyncio.sleep(pause)
            return

        clock = asyncio.get_running_loop().time
        looked_at = clock()
        rest = min(_REST * (looked_at - self._waited_until) * waiters, _LONGEST_REST)

        try:
            async with asyncio.timeout(longest):
                await self._changed.wait()

            await asyncio.sleep(looked_at + rest - clock())
            self._changed.clear()
        except TimeoutError:
            pass
        finally:
            self._waited_until = clock()

    async def _collect(self, changes: AsyncIterator[str]) -> None:
        try:
            async for _ in changes:
                self._changed.set()
        except Exception:
            log.warning("watching failed; polling instead", exc_info=True)
        finally:
            self._changed.set()


async def retry_unclear(
    operation: Callable[[], Awaitable[T]],
    timeout: float = RETRY_FOR,
    *,
    retry_rejected: bool = False,
) -> T:
    """Repeat an operation while it is unclear whether the store applied it.

    The operation must be idempotent. The call methods are, with the same ids.

    ``BackendUnavailable`` without ``maybe_applied`` proves that a try did not run.
    Such a try is repeated only with ``retry_rejected``, or after an earlier unclear
    try. Once the next try would start more than ``timeout`` seconds after the first
    failure, the error is raised. It has ``maybe_applied`` if any try may have been
    applied.
    """
    deadline: float | None = None
    unclear: BackendUnavailable | None = None
    pauses: Iterator[float] | None = None

    while True:
        try:
            return await operation()
        except BackendUnavailable as exc:
            now = asyncio.get_running_loop().time()
            deadline = now + timeout if deadline is None else deadline
            pauses = pauses or backoff_pauses()
            pause = next(pauses)

            if exc.maybe_applied:
                unclear = exc

            if unclear is None and not retry_rejected:
                raise

            if now + pause > deadline:
                error = unclear or exc
                raise error from error.__cause__

        await asyncio.sleep(pause)


async def run_shielded(work: Callable[[], Awaitable[None]]) -> None:
    """Wait until ``work`` is done; log what it raises. Each try has 30 seconds.

    If the caller is cancelled, ``work`` continues, however often that happens (anyio
    cancels again at every await). The cancellation is raised afterwards. ``work`` must
    be idempotent: it is called again if its own task is cancelled, which
    ``asyncio.run`` does when it ends.
    """

    async def bounded() -> None:
        try:
            async with asyncio.timeout(RETRY_FOR):
                await work()
        except Exception:
            log.warning("could not record an outcome", exc_info=True)

    cancelled: asyncio.CancelledError | None = None

    for _ in range(2):
        task = asyncio.create_task(bounded())

        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as exc:
                cancelled = exc

        if not task.cancelled():
            break

    if cancelled is not None:
        raise cancelled
