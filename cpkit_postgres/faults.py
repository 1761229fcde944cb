"""What asyncpg's errors mean in the contract's words, and what may be tried again."""

from __future__ import annotations

import asyncio
import random
from enum import Enum

import asyncpg

from cpkit.errors import BackendUnavailable, CheckpointerError, CorruptThread

__all__ = ["CLIENT_ERRORS", "READ_ONLY", "Fate", "Patience", "fate", "translated"]

# All that asyncpg raises for what happens to a connection; TimeoutError is an OSError.
CLIENT_ERRORS = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
)

READ_ONLY = "25006"

# Rolled back, and worth another try: serialization failure, deadlock, lock timeout.
_CONFLICTS = {"40001", "40P01", "55P03"}

# The server is going or not there yet: shutdown, crash, starting up, idle timeout, no
# connection left for us. Class 08 is what poolers say of a server that they lost.
_GOING = {"57P01", "57P02", "57P03", "57P05", "53300"}

_DAMAGED = {"XX001", "XX002"}


class Fate(Enum):
    """What became of a statement, or of an attempt to connect."""

    AGAIN = "it did not run, and may do when tried again"
    REFUSED = "it did not run, and would not do the next time"
    LOST = "nobody here knows whether it ran"


def fate(exc: BaseException) -> Fate:
    """Return what an error says about the statement that it ended."""
    if isinstance(exc, asyncpg.PostgresError):
        code = exc.sqlstate or ""

        if code in _CONFLICTS:
            return Fate.AGAIN

        return Fate.LOST if code in _GOING or code[:2] == "08" else Fate.REFUSED

    # asyncpg's own word, before it has sent anything: the connection is closed.
    return Fate.AGAIN if isinstance(exc, asyncpg.InterfaceError) else Fate.LOST


def translated(
    exc: BaseException, store: str, *, maybe_applied: bool = False
) -> CheckpointerError:
    """Return the error of the contract for one of asyncpg's."""
    reason = str(exc) or type(exc).__name__
    code = getattr(exc, "sqlstate", None)

    if code in _DAMAGED:
        return CorruptThread("?", store, reason)

    if isinstance(exc, TimeoutError):
        reason = "no answer within the timeout"
    elif code == READ_ONLY:
        reason = f"the server takes no writes: {reason}"

    return BackendUnavailable(store, reason, maybe_applied=maybe_applied)


class Patience:
    """Pauses between tries, longer each time, until the time is up.

    Random in length, so that the clients of a server that comes back do not all come
    back in the same instant. The time counts from the first pause.
    """

    FIRST, LONGEST = 0.01, 1.0

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline: float | None = None
        self._pause = self.FIRST

    async def pause(self) -> bool:
        """Sleep and return ``True``, or return ``False`` where the time is up."""
        now = asyncio.get_running_loop().time()

        if self._deadline is None:
            self._deadline = now + self._seconds

        if now >= self._deadline:
            return False

        pause = self._pause * random.uniform(0.5, 1)
        self._pause = min(2 * self._pause, self.LONGEST)
        await asyncio.sleep(min(pause, self._deadline - now))
        return True
