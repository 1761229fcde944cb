"""The folder: the names in it, its creation, and how its files are locked and synced.

Locks are ``flock``'s. They belong to one opening of a file, so they hold between two
threads of a process as between two processes, and end with the process.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from cpkit.driver import (
    FileSystem,
    StoreFailure,
    StoreInfo,
    create_folder,
    file_system,
    sync_folder,
)
from cpkit.errors import SchemaMismatch

try:
    import fcntl
except ImportError:  # Windows; opening a store raises there
    fcntl = None  # type: ignore[assignment]  # absent there, and not used then

FORMAT_VERSION = 1
# In this order, an ordinary copy of a store in use has the key of each call.
THREADS, KEYS = "threads", "used-keys"
MARK = "cpkit.json"
# The endings of the file that keeps torn writes of a log for a person to see, and of
# the file that becomes a log when it is complete.
TORN, DRAFT = ".torn", ".tmp"
LOG_NAME = re.compile(r"[a-z0-9-]{1,40}~[0-9a-f]{64}\.jsonl")
REGISTER_NAME = re.compile(r"[0-9a-f]{2}\.jsonl")

_README = """\
State of AI agents, kept by cpkit. Read these files as you like, but do not edit them.

threads/NAME~HASH.jsonl   The log of a thread: one JSON line for each operation, for
                          tail -F and jq. NAME is the start of the thread's id, and
                          HASH the SHA-256 of the id. "add" are messages, "extra" are
                          values, "call" is a tool call or its outcome, "at" has the
                          thread's version, the time (microseconds), a checksum.
used-keys/XX.jsonl        Which call used an idempotency key; XX is the start of the
                          key's SHA-256. A line counts if the log has its call.
*.torn                    Bytes of a write that a crash cut short; not acknowledged.
*.tmp                     A log that was not complete when its process ended.
cpkit.json                The version of the format.

To copy the folder while agents run, copy threads/ first (rsync -a does). The first
opening of a copy adds keys that used-keys/ lacks.
"""
# macOS, where fsync stops at the drive's cache.
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)


def log_name(thread_id: str) -> str:
    """Return the file name of a thread's log; no other thread has it in any case."""
    words = words_of(thread_id) or "thread"
    return f"{words}~{sha256(thread_id.encode()).hexdigest()}.jsonl"


def words_of(thread_id: str) -> str:
    """Return what the log's name starts with; the same for a start of the id."""
    words = re.sub(r"[^a-z0-9]+", "-", thread_id.lower())
    # A file's name stays below 143 bytes, the limit of eCryptfs, the lowest in use.
    return words[:40].strip("-")


def register_name(key: str) -> str:
    """Return the file name of the register that has the key."""
    return sha256(key.encode()).hexdigest()[:2] + ".jsonl"


def prepare(path: str, store: str) -> FileSystem:
    """Create what is missing; raise ``SchemaMismatch`` for another version."""
    if not hasattr(fcntl, "flock"):
        reason = "this platform has no POSIX file locks; use sqlite:///"
        raise StoreFailure("rejected", reason)

    mark = os.path.join(path, MARK)

    if not os.path.exists(mark):
        above = next(one for one in (Path(path), *Path(path).parents) if one.is_dir())

        # A file system without locks fails here, before anything is created.
        with locked(above):
            create_folder(path, parents=True)

        with locked(path):  # others may create the store now
            if not os.path.exists(mark):
                _write_file(os.path.join(path, "README"), _README)
                _write_file(mark, f'{{"cpkit":"file","version":{FORMAT_VERSION}}}\n')

    if (found := _version(mark)) != FORMAT_VERSION:
        raise SchemaMismatch(store, found, FORMAT_VERSION)

    for name in (THREADS, KEYS):
        if not os.path.isdir(folder := os.path.join(path, name)):
            create_folder(folder)  # a copy may lack what was empty

        # Two containers with registers of their own would both get a key.
        if file_system(folder).mount != (system := file_system(path)).mount:
            problem = f"{folder} is mounted alone, and keys and calls belong together"
            raise StoreFailure("rejected", f"{problem}: mount the folder above")

    if len(os.listdir(folder)) < 256:
        for number in range(256):
            register = os.path.join(folder, f"{number:02x}.jsonl")
            os.close(os.open(register, os.O_WRONLY | os.O_CREAT, 0o600))

        sync_folder(folder)

    system.warn()
    return system


def _write_file(path: str, text: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC

    with open(os.open(f"{path}.tmp", flags, 0o600), "w") as file:
        file.write(text)
        file.flush()
        sync_content(file.fileno())

    os.rename(f"{path}.tmp", path)
    sync_folder(os.path.dirname(path))


def _version(mark: str) -> object:
    """Return the version in a mark, or a text that says what the mark has."""
    found = Path(mark).read_bytes()[:1000]

    try:
        return json.loads(found)["version"]
    except (ValueError, TypeError, LookupError):
        return f"in {found!r}"


def inspect(path: str) -> StoreInfo | None:
    """Tell whether a folder is a store; ``None`` where that is unclear."""
    try:
        version = _version(os.path.join(path, MARK))
    except (FileNotFoundError, NotADirectoryError):
        return StoreInfo(False, path=path if os.path.exists(path) else None)
    except OSError:
        return None

    size = left = 0

    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):  # removed since it was listed
                one = os.lstat(os.path.join(folder, name)).st_size
                size += one
                left += one if name.endswith((TORN, DRAFT)) else 0

    words = f"{left:,} bytes of writes that a crash cut short; while no agent runs: "
    command = f"rm -f '{path}'/*/*{DRAFT} '{path}'/*/*{TORN}"
    dead = {"left over": words + command} if left else {}
    is_known = isinstance(version, int)
    return StoreInfo(True, version, size, path, dead) if is_known else None


# Files that are locked and synced


def lock(fd: int, path: str) -> None:
    """Lock a file for writing, or raise ``StoreFailure("not sent", …)``.

    It tries for a few milliseconds; most writes of others take less.
    """
    for _ in range(20):
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.0002)

    raise StoreFailure("not sent", f"another writer holds the lock of {path}")


@contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Lock a folder for the time of the block."""
    # With the dot, it may be a symbolic link.
    fd = os.open(os.path.join(folder, "."), os.O_RDONLY | os.O_DIRECTORY)

    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        unlock(fd)


def unlock(fd: int) -> None:
    """Close a file, and unlock it also for a child that was forked meanwhile."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def sync_content(fd: int) -> None:
    """Return when the file's content will survive a power loss."""
    if _FULL_SYNC is None:
        os.fdatasync(fd)
    else:
        fcntl.fcntl(fd, _FULL_SYNC)
