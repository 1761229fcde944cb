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

from cpkit.driver import Findings, StoredCall
from cpkit.errors import CorruptThread
from cpkit_file import lines
from cpkit_file.keys import find_call
from cpkit_file.lines import Lines
from cpkit_file.log import Folder, opened
from cpkit_file.schema import LOG_NAME, MARK, REGISTER_NAME, locked, register_name
from cpkit_file.writing import Locked

# Logs, and lines of registers, that `examine` looks at unless it looks at all.
_BOUND = 2000


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


def examine(folder: Folder, whole: bool) -> Findings:
    """Count calls without their keys, and keys without their calls.

    Looks at the first logs and keys; at all, and for damage, if it is to be ``whole``.
    """
    limit = None if whole else _BOUND
    unknown = [call for call in calls(folder, limit) if not is_known(folder, call)]
    advice: list[str] = []
    facts: dict[str, str] = {}

    if unknown:
        one = unknown[0]
        advice.append(
            f"{len(unknown)} calls, such as {one.call_id!r} in thread "
            f"{one.thread_id!r}, have no key in used-keys/, and could be made again: "
            f"stop the agents, run touch '{_mark(folder)}', and open the store"
        )

    if void := sum(
        not _is_made(folder, *one) for one in islice(_claims(folder), limit)
    ):
        facts["void keys"] = f"{void} lines of used-keys/ without a call: harmless"

    return Findings(_damaged(folder) if whole else [], advice, facts)


def _claims(folder: Folder) -> Iterator[tuple[str, int, str, str]]:
    """Yield the lines of all registers that can be read."""
    for name in filter(REGISTER_NAME.fullmatch, os.listdir(folder.keys)):
        with suppress(CorruptThread):
            with opened(folder, f"{folder.keys}/{name}") as register:
                register.index.catch_up(register)

            for key, claims in register.index.claims.items():
                yield from ((key, *claim) for claim in claims)


def _is_made(
    folder: Folder, key: str, attempt: int, thread_id: str, call_id: str
) -> bool:
    try:
        call = find_call(folder, thread_id, call_id)
    except CorruptThread:
        return True  # a read of the thread raises it

    return call is not None and (call.idempotency_key, call.attempt) == (key, attempt)


def _damaged(folder: Folder) -> list[str]:
    """Read all lines, and return where one does not fit its seal."""
    found = []

    for place, names in ((folder.threads, LOG_NAME), (folder.keys, REGISTER_NAME)):
        for name in filter(names.fullmatch, sorted(os.listdir(place))):
            try:
                with opened(Folder(folder.path), f"{place}/{name}") as log:
                    log.owner = log.header().get("thread", "")
                    log.index.catch_up(log)
            except CorruptThread as exc:
                found.append(str(exc))

    return found


def _add(unknown: list[StoredCall], folder: Folder) -> None:
    for name in {register_name(call.idempotency_key) for call in unknown}:
        with Locked(folder, f"{folder.keys}/{name}") as register:
            added = Lines(register.tail.sum)

            for call in unknown:
                if register_name(call.idempotency_key) == name:
                    added.add(lines.claimed(call))

            register.append(added)
