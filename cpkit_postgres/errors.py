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
EXISTS = {"42P06", "42P07", "42710", "23505"}  # a schema, table, type, row
MISSING = {"3F000", "42P01", "42703"}  # a schema, table, column

# Rolled back, and may succeed when tried again: serialization failure, deadlock, lock
# timeout, statement timeout, and a transaction that the server ended because this
# process was stopped.
_ROLLED_BACK = {"40001", "40P01", "55P03", "57014", "25P03"}

# The server shuts down, has crashed, is starting, has ended an idle session, or has no
# connection left. Poolers report a lost server with class 08.
_UNAVAILABLE = {"57P01", "57P02", "57P03", "57P05", "53300"}

_DAMAGED = {"XX001", "XX002"}


def failure(
    exc: BaseException, store: str, lost: Fate = "unknown"
) -> StoreFailure | CorruptThread:
    """Return what to raise for one of `CLIENT_ERRORS`.

    ``lost`` is the fate where the connection was lost: "not sent" while connecting, and
    inside a transaction.
    """
    code = sqlstate(exc)
    reason = str(exc) or type(exc).__name__

    if code in _DAMAGED:
        return CorruptThread("?", store, reason)

    if _is_lost(exc):
        if isinstance(exc, TimeoutError):
            reason = "no answer within the timeout"
        elif lost == "not sent" and isinstance(exc, OSError):
            reason += "; is the server running?"

        return StoreFailure(lost, reason)

    if code == READ_ONLY:
        reason = f"the server takes no writes: {reason}"

    # asyncpg's own errors before it sends. Connecting: the caller's pool is closed. A
    # statement: the connection is closed, or (a ValueError) an argument is wrong.
    unsent = isinstance(exc, asyncpg.InterfaceError) and not isinstance(exc, ValueError)
    repeatable = code in _ROLLED_BACK or (unsent and lost == "unknown")
    return StoreFailure("not sent" if repeatable else "rejected", reason)


def is_usable_after(exc: BaseException) -> bool:
    """Tell whether the connection of a failed statement can be used again.

    Not if it was lost, if its state is unknown, or if its server takes no writes any
    more: another one may be the primary now.
    """
    is_known = isinstance(exc, asyncpg.PostgresError) and not _is_lost(exc)
    return is_known and sqlstate(exc) != READ_ONLY


def _is_lost(exc: BaseException) -> bool:
    """Tell whether a client error means that the server's answer is missing."""
    if isinstance(exc, asyncpg.PostgresError):
        code = sqlstate(exc)
        return code in _UNAVAILABLE or code.startswith("08")

    return not isinstance(exc, asyncpg.InterfaceError)


def sqlstate(exc: BaseException | None) -> str:
    """Return the server's code for an error; empty if it is not the server's."""
    return getattr(exc, "sqlstate", None) or ""
