"""Count the fsyncs of SQLite's log by wrapping the methods of the log's file.

No tracer is needed: the file's table of methods (sqlite.org/c3ref/io_methods.html) is
copied, and ``xSync`` is replaced in the copy.
"""

from __future__ import annotations

import _sqlite3
import ctypes
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["Syncs", "counted"]

SYNC = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
JOURNAL_POINTER = 28  # SQLITE_FCNTL_JOURNAL_POINTER: the log's file, in WAL mode


class Methods(ctypes.Structure):
    """``sqlite3_io_methods`` up to version 3; only ``xSync`` is called from here."""

    _fields_ = (
        ("iVersion", ctypes.c_int),
        ("before", ctypes.c_void_p * 4),  # xClose, xRead, xWrite, xTruncate
        ("xSync", ctypes.c_void_p),
        ("after", ctypes.c_void_p * 12),
    )


class File(ctypes.Structure):
    """``sqlite3_file``: its first field is the table of its methods."""

    _fields_ = (("methods", ctypes.c_void_p),)


class Syncs:
    """How many fsyncs there were since `take` was called."""

    count: int = 0

    def take(self) -> int:
        """Return the count, and start again at 0."""
        count, self.count = self.count, 0
        return count


@contextmanager
def counted(db: sqlite3.Connection) -> Iterator[Syncs]:
    """Count the syncs of the connection's log, which a write has made already.

    To be entered and left while nothing runs on the connection.
    """
    file = _log_of(db)
    original = file.methods  # the address: a number, not a view of the field
    methods = Methods.from_address(original)
    syncs = Syncs()
    sync = SYNC(methods.xSync)

    def count(file: int, flags: int) -> int:
        syncs.count += 1
        return int(sync(file, flags))

    wrapped = Methods.from_buffer_copy(methods)
    ours = SYNC(count)
    wrapped.xSync = ctypes.cast(ours, ctypes.c_void_p).value
    file.methods = ctypes.addressof(wrapped)

    try:
        yield syncs
    finally:
        file.methods = original


def _log_of(db: sqlite3.Connection) -> File:
    try:
        control = ctypes.CDLL(_sqlite3.__file__).sqlite3_file_control
    except (AttributeError, OSError):
        pytest.skip("needs a SQLite library that is not hidden in Python")

    # SQLite's handle is the first field of CPython's connection object.
    handle = ctypes.c_void_p.from_address(id(db) + object.__basicsize__)
    file = ctypes.POINTER(File)()
    code = control(handle, b"main", JOURNAL_POINTER, ctypes.byref(file))
    assert code == sqlite3.SQLITE_OK
    assert file
    return file.contents
