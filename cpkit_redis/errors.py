"""What the client's and the server's errors prove about a command."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from typing import Any

from redis import exceptions as redis

from cpkit.driver import StoreFailure
from cpkit.errors import CorruptThread

CLIENT_ERRORS = (redis.RedisError, OSError)
"""What the client library raises; its own timeouts and Python's are among them."""

UNWRITABLE = frozenset({"MISCONF", "NOREPLICAS", "OOM"})
"""Codes of a primary that refuses all writes for now."""

# Settings that name a file.
_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")

# Not their subclasses: the other end hung up, as a server that stops does.
_TLS_FAULTS = (ssl.SSLError, ssl.SSLCertVerificationError)
# Where TLS has files to read; a Unix socket may be missing because its server is.
_FILE_FAULTS = (FileNotFoundError, IsADirectoryError, NotADirectoryError)

# The server answered instead of running the command. redis-py counts some of these
# answers as errors of the connection.
_ANSWERS = (
    redis.ResponseError,
    redis.BusyLoadingError,
    redis.AuthenticationError,
    redis.AuthorizationError,
)

# redis-py removes the code from the text of these.
_CODES: dict[type[redis.RedisError], str] = {
    redis.AskError: "ASK",
    redis.BusyLoadingError: "LOADING",
    redis.ClusterDownError: "CLUSTERDOWN",
    redis.MasterDownError: "MASTERDOWN",
    redis.MovedError: "MOVED",
    redis.NoPermissionError: "NOPERM",
    redis.TryAgainError: "TRYAGAIN",
}

# An error inside a script may have the script's name and line before its code, and a
# "-" too (Redis 6.2).
_CODE = re.compile(r"(?:^|: )-?([A-Z]{2,}) ")

# Codes of a server that runs commands again soon (BUSY: another client's script takes
# long), and of a cluster's node when another one has the slot, or none.
_SOON = frozenset("ASK BUSY CLUSTERDOWN LOADING MASTERDOWN MOVED TRYAGAIN".split())

_ADVICE = {
    "LOST": "other keys may be lost too: restore a backup, or SET it to 1 to go on "
    "with what is left",
    "MISCONF": "the server cannot write to its disk",
    "NOPERM": "the manual of cpkit_redis.store lists the permissions that are needed",
    "OOM": "the server is at its maxmemory",
    "READONLY": "the server is a replica: write the URL of the primary",
    "VANISHED": "the store was emptied, or the server replaced by one with other data, "
    "while this handle was open: restore a backup, or open a new store",
}


def failure(error: Exception | str) -> StoreFailure:
    """Return what an error of the client, or an error text of the server, proves.

    An error of the connection is ``"unknown"``: the command may have been sent.
    """
    if isinstance(error, StoreFailure):
        return error

    if not isinstance(error, (str, *_ANSWERS)):
        return StoreFailure("unknown", str(error) or type(error).__name__)

    removed = "" if isinstance(error, str) else _CODES.get(type(error), "")
    text = f"{removed} {error}".strip()
    code = code_of(text)
    advice = f" ({_ADVICE[code]})" if code in _ADVICE else ""
    return StoreFailure("not sent" if code in _SOON else "rejected", text + advice)


def not_connected(error: Exception, settings: Mapping[str, Any]) -> StoreFailure:
    """Return why there is no connection; a fault of this machine is ``"rejected"``.

    ``settings`` are those of the connection.
    """
    used = ", ".join(f"{one}={settings[one]}" for one in _FILES if settings.get(one))
    reason = str(error).rstrip(".") or type(error).__name__
    causes: list[BaseException] = [error]

    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)

    if any(type(one) in (_FILE_FAULTS if used else ()) + _TLS_FAULTS for one in causes):
        return StoreFailure("rejected", f"{reason} ({used or 'no ssl_ca_certs'})")

    if any(isinstance(one, PermissionError) for one in causes):  # of a socket
        return StoreFailure("rejected", reason)

    # Something is there, and hangs up or does not answer.
    is_there = not re.match("Error .* connecting to ", reason)
    doubt = ", with TLS for rediss:// and without for redis://" if is_there else ""
    return StoreFailure("not sent", f"{reason}; is the server running{doubt}?")


def refusal(error: Exception | str, thread_id: str) -> StoreFailure | CorruptThread:
    """Return the failure, or ``CorruptThread`` where a stored value is the cause."""
    refused = failure(error)

    if code_of(refused.reason) in ("CORRUPT", "WRONGTYPE"):
        return CorruptThread(thread_id, "its keys", refused.reason)

    return refused


def code_of(text: str) -> str:
    """Return the code of a server's error, or an empty text."""
    # A script used a command or a key that the user may not use. Redis up to 8 has no
    # code for it.
    if "user executing the script" in text or "ACL failure in script" in text:
        return "NOPERM"

    found = _CODE.search(text)
    return found[1] if found else ""
