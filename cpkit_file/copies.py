"""Keys that a copy of the folder lacks, although its logs have calls that used them.

A copy that was made while agents wrote can have registers that are older than its
logs, and so can a folder where a backup was restored over newer files. A paid key
would be claimed again. So the first opening of such a folder reads all logs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from cpkit.driver import StoredCall
from cpkit.errors import CorruptThread
from cpkit_file import lines
from cpkit_file.lines import Lines
from cpkit_file.log import Folder, opened
from cpkit_file.schema import LOG_NAME, MARK, locked, register_name
from cpkit_file.writing import Locked


def check_copy(folder: Folder) -> None:
    """Make the key of each call known, unless this folder was checked before."""
    if _is_checked(folder) or not os.access(folder.path, os.W_OK):
        return

    with locked(folder.path):  # others may open the copy now
        if not _is_checked(folder):
            _add([call for call in calls(folder) if not is_known(folder, call)], folder)

            with suppress(PermissionError):  # the owner's next opening checks again
                os.utime(_mark(folder), ns=(_changed(folder), _changed(folder)))


def _is_checked(folder: Folder) -> bool:
    """Return whether cpkit.json has the time of the last change of ``used-keys/``.

    That time changes with the names there, which stay the same after the creation of
    the store. No program can set it, so a copy has another one.
    """
    return os.stat(_mark(folder)).st_mtime_ns == _changed(folder)


def _mark(folder: Folder) -> str:
    return os.path.join(folder.path, MARK)


def _changed(folder: Folder) -> int:
    return os.stat(folder.keys).st_ctime_ns


def calls(folder: Folder, limit: int | None = None) -> Iterator[StoredCall]:
    """Yield the calls of all logs that can be read, or of so many logs."""
    names = (one for one in os.listdir(folder.threads) if LOG_NAME.fullmatch(one))

    for name in islice(names, limit):
        with suppress(CorruptThread):  # a read of the thread raises it
            with opened(folder, f"{folder.threads}/{name}") as log, log.index.lock:
                log.owner = log.header().get("thread", "")
                log.index.catch_up(log)
                found = [call for call, *_ in log.index.calls.values()]

            yield from found


def is_known(folder: Folder, call: StoredCall) -> bool:
    """Return whether the register of a call's key leads to the call."""
    key = call.idempotency_key

    with opened(folder, f"{folder.keys}/{register_name(key)}") as register:
        try:
            with register.index.lock:
                register.index.catch_up(register)
        except CorruptThread:
            return True  # a claim of the key raises it

        claims = register.index.claims.get(key, ())
        return (call.attempt, call.thread_id, call.call_id) in claims


def _add(unknown: list[StoredCall], folder: Folder) -> None:
    for name in {register_name(call.idempotency_key) for call in unknown}:
        with Locked(folder, f"{folder.keys}/{name}") as register:
            added = Lines(register.tail.sum)

            for call in unknown:
                if register_name(call.idempotency_key) == name:
                    added.add(lines.claimed(call))

            register.append(added)
