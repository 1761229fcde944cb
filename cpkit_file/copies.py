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

        unknown = [one for one in _calls(folder, []) if not _is_known(folder, one)]

        for path, added in groupby(sorted(unknown, key=register_of), register_of):
            with Locked(folder, path) as register:
                register.append([*map(claimed, added)])

        changed = os.stat(folder.keys).st_ctime_ns

        with suppress(PermissionError):  # the owner's next opening checks again
            os.utime(folder.mark, ns=(changed, changed))


def examine(folder: Folder, whole: bool) -> Findings:
    """Count calls without their keys, and keys without their calls.

    Looks at the first logs; at all, and for damage, if it is to be ``whole``.
    """
    damaged: list[str] = []
    facts: dict[str, str] = {}
    calls = [*_calls(folder, damaged, None if whole else _BOUND)]
    unknown = [one for one in calls if not _is_known(folder, one)]
    advice = [
        f"{len(unknown)} calls, such as {one.call_id!r} in thread {one.thread_id!r}, "
        "have no key in used-keys/, and could be made again: stop the agents, run "
        f"touch '{folder.mark}', and open the store"
        for one in unknown[:1]
    ]

    if whole or len(os.listdir(folder.threads)) <= _BOUND:
        registers = _files(folder, folder.keys, REGISTER_NAME, damaged)
        claims = [len(one) for log in registers for one in log.index.claims.values()]

        if (void := sum(claims) - len(calls) + len(unknown)) > 0:
            words = f"{void} lines of used-keys/ without a call: harmless"
            facts["void keys"] = words

    return Findings(damaged if whole else [], advice, facts)


def _calls(
    folder: Folder, damaged: list[str], limit: int | None = None
) -> Iterator[StoredCall]:
    """Yield the calls of the logs."""
    for log in _files(folder, folder.threads, LOG_NAME, damaged, limit):
        yield from log.calls()


def _files(
    folder: Folder,
    place: str,
    names: re.Pattern[str],
    damaged: list[str],
    limit: int | None = None,
) -> Iterator[Log]:
    """Read all lines of logs or registers, yield these, and note what is damaged."""
    for name in islice(filter(names.fullmatch, sorted(os.listdir(place))), limit):
        with Log(folder, f"{place}/{name}") as log:
            try:
                log.owner = log.header().get("thread", "")
                log.calls()
            except CorruptThread as exc:
                damaged.append(str(exc))
            else:
                yield log


def _is_known(folder: Folder, call: StoredCall) -> bool:
    """Return whether the register of a call's key leads to the call."""
    key = call.idempotency_key

    with Log(folder, folder.register(key)) as register:
        try:
            claims = register.claims(key)
        except CorruptThread:
            return True  # a claim of the key raises it

    return (call.attempt, call.thread_id, call.call_id) in claims
