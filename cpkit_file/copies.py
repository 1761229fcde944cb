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
from cpkit_file import lines
from cpkit_file.lines import Lines
from cpkit_file.log import Folder, Log, opened
from cpkit_file.schema import LOG_NAME, MARK, REGISTER_NAME, locked, register_name
from cpkit_file.writing import Locked

# Logs that `examine` looks at unless it looks at all.
_BOUND = 2000


def check_copy(folder: Folder) -> None:
    """Make the key of each call known, unless this folder was checked before."""
    if _is_checked(folder) or not os.access(folder.path, os.W_OK):
        return

    with locked(folder.path):  # others may open the copy now
        if not _is_checked(folder):
            unknown = [one for one in _calls(folder, []) if not _is_known(folder, one)]
            unknown.sort(key=_register_of)

            for name, calls in groupby(unknown, _register_of):
                with Locked(folder, f"{folder.keys}/{name}") as register:
                    added = Lines(register.tail.sum)

                    for call in calls:
                        added.add(lines.claimed(call))

                    register.append(added)

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


def examine(folder: Folder, whole: bool) -> Findings:
    """Count calls without their keys, and keys without their calls.

    Looks at the first logs; at all, and for damage, if it is to be ``whole``.
    """
    damaged: list[str] = []
    unknown: list[StoredCall] = []
    known = 0

    for call in _calls(folder, damaged, None if whole else _BOUND):
        if _is_known(folder, call):
            known += 1
        else:
            unknown.append(call)

    advice: list[str] = []
    facts: dict[str, str] = {}

    if unknown:
        one = unknown[0]
        advice.append(
            f"{len(unknown)} calls, such as {one.call_id!r} in thread "
            f"{one.thread_id!r}, have no key in used-keys/, and could be made again: "
            f"stop the agents, run touch '{_mark(folder)}', and open the store"
        )

    if whole or len(os.listdir(folder.threads)) <= _BOUND:
        registers = _files(folder, folder.keys, REGISTER_NAME, damaged)
        claims = [len(one) for log in registers for one in log.index.claims.values()]

        if (void := sum(claims) - known) > 0:
            words = f"{void} lines of used-keys/ without a call: harmless"
            facts["void keys"] = words

    return Findings(damaged if whole else [], advice, facts)


def _calls(
    folder: Folder, damaged: list[str], limit: int | None = None
) -> Iterator[StoredCall]:
    """Yield the calls of the logs."""
    for log in _files(folder, folder.threads, LOG_NAME, damaged, limit):
        yield from [call for call, *_ in log.index.calls.values()]


def _files(
    folder: Folder,
    place: str,
    names: re.Pattern[str],
    damaged: list[str],
    limit: int | None = None,
) -> Iterator[Log]:
    """Read all lines of logs or registers, yield these, and note what is damaged."""
    for name in islice(filter(names.fullmatch, sorted(os.listdir(place))), limit):
        try:
            with opened(folder, f"{place}/{name}") as log, log.index.lock:
                log.owner = log.header().get("thread", "")
                log.index.catch_up(log)
        except CorruptThread as exc:
            damaged.append(str(exc))
        else:
            yield log


def _is_known(folder: Folder, call: StoredCall) -> bool:
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


def _register_of(call: StoredCall) -> str:
    return register_name(call.idempotency_key)
