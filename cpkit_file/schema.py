"""What lies in the folder: names, the mark with the format's version, creation.

::

    cpkit.json                  the mark: {"cpkit":"file","version":1}
    threads/NAME~HASH.jsonl     a thread's log
    threads/NAME~HASH.jsonl.torn    unacknowledged bytes that a crash left in the log
    claims/D/HASH.SLOT          a link from a key to a log; see `cpkit_file.claims`

A log's ``HASH`` is the SHA-256 of the thread id, so that two ids never have one name,
on case-insensitive file systems either. ``NAME`` is for people: what is left of the id
in ``a-z0-9-``. It is never a reserved name of Windows, and does not start with a dot.
A claim's ``HASH`` is of the idempotency key, and ``D`` is its first digit.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256

from cpkit.driver import StoreInfo
from cpkit.errors import SchemaMismatch
from cpkit_file.files import (
    locked_file,
    opened,
    sync_content,
    sync_names,
    write_all,
)

__all__ = ["FORMAT_VERSION", "LOG_NAME", "claim_stem", "inspect", "log_name", "prepare"]

FORMAT_VERSION = 1
LOG_NAME = re.compile(r"[a-z0-9-]{1,40}~[0-9a-f]{64}\.jsonl")

# Keeps the name below the 143 bytes of eCryptfs, the least of any file system in use.
_NAME_LENGTH = 40
# Claims in one subfolder wait for each other; the disk allows no more at once anyway.
_SHARDS = "0123456789abcdef"


@lru_cache(8192)
def log_name(thread_id: str) -> str:
    """Return the file name of the thread's log."""
    words = re.sub(r"[^a-z0-9]+", "-", thread_id.lower())[:_NAME_LENGTH].strip("-")
    return f"{words or 'thread'}~{sha256(thread_id.encode()).hexdigest()}.jsonl"


def claim_stem(key: str) -> str:
    """Return what the names of all links of the key start with."""
    return sha256(key.encode()).hexdigest()


def prepare(path: str, store: str) -> None:
    """Create what is missing; a complete folder is only read.

    Raises ``SchemaMismatch`` for a folder of another version.
    """
    mark = os.path.join(path, "cpkit.json")
    claims = os.path.join(path, "claims")
    shards = [os.path.join(claims, shard) for shard in _SHARDS]
    folders = [os.path.join(path, "threads"), claims, *shards]

    if os.path.exists(mark):
        _check_version(mark, store)

    if all(map(os.path.exists, (mark, *folders))):
        return

    above = [path]

    while os.path.dirname(above[-1]) != above[-1]:
        above.append(os.path.dirname(above[-1]))

    made: list[str] = []

    try:
        for folder in reversed(above):
            _make(folder, made)

        # Under a lock, because an older cpkit must not overwrite the mark of a newer
        # one. The lock fails on a file system without locks, the link on one without.
        with locked_file(path, os.O_RDONLY | os.O_DIRECTORY):
            _check_links(path)

            if os.path.exists(mark):
                _check_version(mark, store)

            for folder in folders:
                _make(folder, made)

            # Another process may have created some of them, and not synced them yet.
            for folder in (claims, *above):
                with suppress(PermissionError):
                    sync_names(folder)

            if not os.path.exists(mark):
                _write_mark(mark)
    except OSError:
        for folder in reversed(made):
            with suppress(OSError):
                os.rmdir(folder)

        raise


def inspect(path: str) -> StoreInfo | None:
    """Tell whether a folder is a store; ``None`` where that is unclear."""
    try:
        with open(os.path.join(path, "cpkit.json"), "rb") as file:
            version = _version(file.read(1000))
    except (FileNotFoundError, NotADirectoryError):
        return StoreInfo(False, path=path if os.path.exists(path) else None)
    except OSError:
        return None

    if not isinstance(version, int):
        return None

    size = sum(
        os.lstat(os.path.join(folder, name)).st_size
        for folder, _, names in os.walk(path)
        for name in names
    )
    return StoreInfo(True, version, size, path)


def _make(folder: str, made: list[str]) -> None:
    """Create a folder, for its owner alone, unless it exists."""
    if not os.path.isdir(folder):
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
            made.append(folder)


def _check_links(path: str) -> None:
    """Raise ``OSError`` on a file system without symbolic links: claims need them."""
    probe = os.path.join(path, "cpkit.probe")

    with suppress(FileNotFoundError):
        os.unlink(probe)

    os.symlink("probe", probe)
    os.unlink(probe)


def _write_mark(mark: str) -> None:
    """Write the mark, last: a folder with a mark is complete."""
    draft = f"{mark}.tmp"

    with opened(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
        write_all(fd, b'{"cpkit":"file","version":%d}\n' % FORMAT_VERSION)
        sync_content(fd)

    os.rename(draft, mark)
    sync_names(os.path.dirname(mark))


def _check_version(mark: str, store: str) -> None:
    with opened(mark) as fd:
        found = _version(os.read(fd, 1000))

    if found != FORMAT_VERSION:
        raise SchemaMismatch(store, found, FORMAT_VERSION)


def _version(mark: bytes) -> object:
    try:
        return json.loads(mark)["version"]
    except (ValueError, TypeError, LookupError):
        return f"in {mark!r}"
