"""Keys that a copy of the folder lacks, although its logs have calls that used them.

A copy that was made while agents wrote can have registers that are older than its
logs, and so can a folder where a backup was restored over newer files. A paid key
would be claimed again: a claim looks only at the logs that the key's register names.
So the first opening of such a folder reads all logs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby

from cpkit.driver import StoredCall
from cpkit.errors import CorruptThread
from cpkit_file.lines import claimed
from cpkit_file.log import Folder, Log
from cpkit_file.schema import LOG_NAME, REGISTER_NAME, locked
from cpkit_file.writing import Locked


def check_copy(folder: Folder) -> None:
    """Make the key of each call known, unless this folder was checked before.

    Then cpkit.json has the time of the last change of ``used-keys/``. That time changes
    with the names there, which stay the same after the creation of the store. No
    program can set it, so a copy has another one.
    """
    if not os.access(folder.path, os.W_OK):
        return

    def register_of(call: StoredCall) -> str:
        return folder.register(call.idempotency_key)

    with locked(folder.path):  # others may open the copy now
        if os.stat(folder.mark).st_mtime_ns == os.stat(folder.keys).st_ctime_ns:
            return

        calls = _calls(folder, folder.threads, LOG_NAME, [])
        unknown = [call for call in calls if not _is_known(folder, call)]

        for path, added in groupby(sorted(unknown, key=register_of), register_of):
            with Locked(folder, path) as register:
                register.append([*map(claimed, added)])

        changed = os.stat(folder.keys).st_ctime_ns

        with suppress(PermissionError):  # the owner's next opening checks again
            os.utime(folder.mark, ns=(changed, changed))


def examine(folder: Folder) -> list[str]:
    """Read all lines of all logs and registers; return what is damaged."""
    damaged: list[str] = []

    for place, names in (folder.threads, LOG_NAME), (folder.keys, REGISTER_NAME):
        list(_calls(folder, place, names, damaged))

    return damaged


def _calls(
    folder: Folder, place: str, names: re.Pattern[str], damaged: list[str]
) -> Iterator[StoredCall]:
    """Read whole logs or registers, yield the calls, and note what is damaged."""
    for name in filter(names.fullmatch, sorted(os.listdir(place))):
        try:
            with Log(folder, f"{place}/{name}") as log:
                log.owner = log.header().get("thread", "")
                yield from log.calls()
        except CorruptThread as exc:
            damaged.append(str(exc))


def _is_known(folder: Folder, call: StoredCall) -> bool:
    """Return whether the register of a call's key leads to the call."""
    key = call.idempotency_key

    with Log(folder, folder.register(key)) as register:
        try:
            claims = register.claims(key)
        except CorruptThread:
            return True  # a claim of the key raises it

    return (call.attempt, call.thread_id, call.call_id) in claims
