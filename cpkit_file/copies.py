"""Keys that a copy of the folder lacks, although its logs have calls that used them.

A copy that was made while agents wrote can have registers that are older than its
logs, and so can a folder where a backup was restored over newer files. A paid key
would be claimed again. So the first opening of such a folder reads all logs. To make a
key known when its log is read would be too late: a claim looks at the key's register
and at the logs that it names, and never at the other logs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby, islice

from cpkit.driver import Findings, StoredCall
from cpkit.errors import CorruptThread
from cpkit_file.lines import claimed
from cpkit_file.log import Folder, Log
from cpkit_file.schema import LOG_NAME, REGISTER_NAME, locked
from cpkit_file.writing import Locked

# Logs that `examine` looks at unless it looks at all.
_BOUND = 2000


def check_copy(folder: Folder) -> None:
    """Make the key of each call known, unless this folder was checked before."""
    if _is_checked(folder) or not os.access(folder.path, os.W_OK):
        return

    with locked(folder.path):  # others may open the copy now
        if _is_checked(folder):
            return

        def register_of(call: StoredCall) -> str:
            return folder.register(call.idempotency_key)

        unknown = sorted(_unknown(folder, []), key=register_of)

        for path, calls in groupby(unknown, register_of):
            with Locked(folder, path) as register:
                register.append([*map(claimed, calls)])

        changed = os.stat(folder.keys).st_ctime_ns

        with suppress(PermissionError):  # the owner's next opening checks again
            os.utime(folder.mark, ns=(changed, changed))


def _is_checked(folder: Folder) -> bool:
    """Return whether cpkit.json has the time of the last change of ``used-keys/``.

    That time changes with the names there, which stay the same after the creation of
    the store. No program can set it, so a copy has another one.
    """
    return os.stat(folder.mark).st_mtime_ns == os.stat(folder.keys).st_ctime_ns


def examine(folder: Folder, whole: bool) -> Findings:
    """Count calls without their keys in the first logs.

    Looks at all logs, and for damage, if it is to be ``whole``.
    """
    damaged: list[str] = []
    unknown = _unknown(folder, damaged, None if whole else _BOUND)
    advice = [
        f"{len(unknown)} calls, such as {one.call_id!r} in thread {one.thread_id!r}, "
        f"have no key in used-keys/, and could be made again: stop the agents, run "
        f"touch '{folder.mark}', and open the store"
        for one in unknown[:1]
    ]

    if not whole:
        return Findings((), advice)

    list(_calls(folder, folder.keys, REGISTER_NAME, damaged))
    return Findings(damaged, advice)


def _unknown(
    folder: Folder, damaged: list[str], limit: int | None = None
) -> list[StoredCall]:
    """Return the calls that their registers do not lead to."""
    calls = _calls(folder, folder.threads, LOG_NAME, damaged, limit)
    return [call for call in calls if not _is_known(folder, call)]


def _calls(
    folder: Folder,
    place: str,
    names: re.Pattern[str],
    damaged: list[str],
    limit: int | None = None,
) -> Iterator[StoredCall]:
    """Read whole logs or registers, yield the calls, and note what is damaged."""
    for name in islice(filter(names.fullmatch, sorted(os.listdir(place))), limit):
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
