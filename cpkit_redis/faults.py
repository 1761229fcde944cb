"""What the server's refusals mean in the contract's words."""

from __future__ import annotations

import re

from redis.exceptions import (
    ClusterCrossSlotError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

from cpkit.errors import BackendUnavailable, CheckpointerError, CorruptThread

__all__ = ["NO_CLUSTER", "UNWRITABLE", "code_of", "text_of", "translated"]

# redis-py takes the code out of the text of these.
_CODES: dict[type[ResponseError], str] = {
    ClusterCrossSlotError: "CROSSSLOT",
    MovedError: "MOVED",
    NoPermissionError: "NOPERM",
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
}

# A refusal inside a script may have the script's name and line before its code, and a
# "-" too (Redis 6.2).
_CODE = re.compile(r"(?:^|: )-?([A-Z]{2,}) ")

NO_CLUSTER = "the server is part of a cluster, which this driver does not know yet"

UNWRITABLE = frozenset({"MISCONF", "NOREPLICAS", "OOM", "READONLY"})
"""Codes by which a server takes no writes for now, of nobody."""

_MENDS = {
    "CROSSSLOT": NO_CLUSTER,
    "MISCONF": "the server cannot write to its disk",
    "MOVED": NO_CLUSTER,
    "NOPERM": "the manual of cpkit_redis.driver has what the user must be allowed",
    "OOM": "the server is at its maxmemory",
    "READONLY": "the server is a replica",
}


def translated(
    text: str, store: str, thread_id: str | None = None, key: bytes = b""
) -> CheckpointerError:
    """Return the error of the contract for a refusal.

    A refused operation has written nothing: the script sees to it.
    """
    code = code_of(text)

    if code in ("CORRUPT", "WRONGTYPE"):
        where = repr(key.decode(errors="backslashreplace")) if key else store
        return CorruptThread(thread_id or "?", where, text)

    mend = _MENDS.get(code)
    return BackendUnavailable(store, f"{text} ({mend})" if mend else text)


def text_of(refusal: ResponseError) -> str:
    """Return a refusal as the server said it."""
    code = _CODES.get(type(refusal))
    return str(refusal) if code is None else f"{code} {refusal}"


def code_of(text: str) -> str:
    """Return the code of a refusal, or nothing."""
    # Of a command or a key that the user may not use from a script; no version of
    # Redis up to 8 has a code for it.
    if "user executing the script" in text or "ACL failure in script" in text:
        return "NOPERM"

    found = _CODE.search(text)
    return "" if found is None else found[1]
