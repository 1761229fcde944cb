"""What asyncpg's errors say about a statement, or an attempt to connect."""

from __future__ import annotations

import re

import asyncpg

from cpkit.driver import StoreFailure
from cpkit.driver.writes import Fate

# All that asyncpg raises for what happens to a connection; TimeoutError is an OSError.
CLIENT_ERRORS = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
)

READ_ONLY = "25006"
CANCELLED = "57014"  # also by a limit of time
NAME_TAKEN = "42P05"  # of a statement
FORBIDDEN = "42501"
EXISTS = {"42P06", "42P07", "42710", "23505"}  # a schema, table, type, row
MISSING = {"3F000", "42P01", "42703"}  # a schema, table, column

# Rolled back, to be tried again: serialization failure, deadlock, lock timeout,
# statement timeout, a transaction that stood still or took too long, and no memory.
_ROLLED_BACK = {"40001", "40P01", "55P03", CANCELLED, "25P03", "25P04", "53200"}

_REFUSALS = re.compile(
    r"startup parameter|authentication failed|does not exist|no such (user|database)"
)

# The server shuts down, has crashed, is starting, has ended an idle session, or has no
# connection left. Poolers report a lost server with class 08.
_UNAVAILABLE = {"57P01", "57P02", "57P03", "57P05", "53300"}


def failure(exc: BaseException, lost: Fate) -> StoreFailure:
    """Return what a store raises for one of `CLIENT_ERRORS`.

    ``lost`` is the fate if the connection was lost: "not sent" before a commit.
    """
    reason = str(exc) or type(exc).__name__

    if _is_lost(exc):
        if isinstance(exc, TimeoutError):
            reason = "no answer within the timeout"
        elif isinstance(exc, OSError) and lost == "not sent":
            reason += "; is the server running?"

        return StoreFailure(lost, reason)

    # asyncpg's own errors come before it sends: the connection is closed, or (a
    # ValueError) an argument is wrong. While connecting: the caller's pool is closed.
    is_closed = isinstance(exc, asyncpg.InterfaceError) and lost == "unknown"

    if sqlstate(exc) in _ROLLED_BACK or (is_closed and not isinstance(exc, ValueError)):
        return StoreFailure("not sent", reason)

    if is_refused_setting(exc):
        reason = f"a pooler takes no settings: remove them from the URL ({reason})"

    if sqlstate(exc) == READ_ONLY:
        reason = f"the server takes no writes: {reason}"

    return StoreFailure("rejected", reason)


def is_usable_after(exc: BaseException) -> bool:
    """Tell whether the connection of a failed statement can be used again.

    Not if its state is unknown, or if its server takes no writes any more: another one
    may be the primary now.
    """
    is_answer = isinstance(exc, asyncpg.PostgresError) and not _is_lost(exc)
    return is_answer and sqlstate(exc) != READ_ONLY


def is_refused_setting(exc: BaseException) -> bool:
    """Tell whether a pooler refused a setting of a new connection."""
    return _is_refusal(exc) and "startup parameter" in str(exc)


def sqlstate(exc: BaseException | None) -> str:
    """Return the server's code for an error; empty if it is not the server's."""
    return getattr(exc, "sqlstate", None) or ""


def _is_refusal(exc: BaseException) -> bool:
    """Tell whether a pooler refused a new connection for good.

    PgBouncer has one code for that, for a server that is away, and for a full pool.
    """
    return sqlstate(exc) == "08P01" and _REFUSALS.search(str(exc)) is not None


def _is_lost(exc: BaseException) -> bool:
    """Tell whether the server's answer is missing."""
    if isinstance(exc, asyncpg.PostgresError):
        is_away = sqlstate(exc) in _UNAVAILABLE or sqlstate(exc).startswith("08")
        return is_away and not _is_refusal(exc)

    return not isinstance(exc, asyncpg.InterfaceError)
