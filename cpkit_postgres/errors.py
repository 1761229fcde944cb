"""What asyncpg's errors say about a statement, or an attempt to connect."""

from __future__ import annotations

import asyncpg

from cpkit.driver import StoreFailure
from cpkit.driver.writes import Fate
from cpkit.errors import CorruptThread

# All that asyncpg raises for what happens to a connection; TimeoutError is an OSError.
CLIENT_ERRORS = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
)

READ_ONLY = "25006"
FORBIDDEN = "42501"
UNIQUE_VIOLATION = "23505"
EXISTS = {"42P06", "42P07", "42710", UNIQUE_VIOLATION}  # a schema, table, type, row
MISSING = {"3F000", "42P01", "42703"}  # a schema, table, column

# Rolled back, and may succeed when tried again: serialization failure, deadlock, lock
# timeout, and a transaction that the server ended because this process was stopped.
IS_ROLLED_BACK = {"40001", "40P01", "55P03", "25P03"}

# A distributed engine does not know whether it committed.
_COMPLETION_UNKNOWN = "40003"

# The server shuts down, has crashed, is starting, has ended an idle session, or has no
# connection left. Poolers report a lost server with class 08.
_UNAVAILABLE = {"57P01", "57P02", "57P03", "57P05", "53300"}

_DAMAGED = {"XX001", "XX002"}


def failure(
    exc: BaseException, store: str, lost: Fate = "unknown"
) -> StoreFailure | CorruptThread:
    """Return what to raise for one of `CLIENT_ERRORS`.

    ``lost`` is the fate where the connection was lost: "not sent" while connecting.
    """
    code = sqlstate(exc)
    reason = str(exc) or type(exc).__name__
    fate = lost

    if code in _DAMAGED:
        return CorruptThread("?", store, reason)

    if code in IS_ROLLED_BACK:
        fate = "not sent"
    elif code == _COMPLETION_UNKNOWN:
        fate = "unknown"
    elif isinstance(exc, asyncpg.PostgresError):
        if code not in _UNAVAILABLE and not code.startswith("08"):
            fate = "rejected"
    elif isinstance(exc, asyncpg.InterfaceError):
        # asyncpg's own errors before it sends. Connecting: the caller's pool is closed.
        # A statement: the connection is closed, or (a ValueError) an argument is wrong.
        connecting = lost == "not sent"
        fate = "rejected" if connecting or isinstance(exc, ValueError) else "not sent"
    elif isinstance(exc, TimeoutError):
        reason = "no answer within the timeout"
    elif lost == "not sent" and isinstance(exc, OSError):
        reason += "; is the server running?"

    if code == READ_ONLY:
        reason = f"the server takes no writes: {reason}"

    return StoreFailure(fate, reason)


def sqlstate(exc: BaseException | None) -> str:
    """Return the server's code for an error; empty if it is not the server's."""
    return getattr(exc, "sqlstate", None) or ""
