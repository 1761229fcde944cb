"""The system calls that change files, read from the output of strace.

strace prints every string as hexadecimal (``-xx``) and the path of each descriptor
(``-y``). A call that another thread interrupts stands on two lines. Each line begins
with the number of the thread.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

__all__ = ["TRACED", "Call", "calls"]

WRITES = ("write", "pwrite64", "writev", "pwritev", "pwritev2")
SYNCS = ("fsync", "fdatasync", "sync", "syncfs", "sync_file_range", "msync")
NAMES = (
    *("rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat"),
    *("unlink", "unlinkat", "mkdir", "mkdirat", "rmdir"),
)
STARTS = ("clone", "clone3", "fork", "vfork")
MOVES = ("chdir", "fchdir")
UNKNOWN = (
    *("io_uring_setup", "io_submit", "copy_file_range", "sendfile", "splice"),
    *("openat2", "mknod", "mknodat"),
)
"""Calls that may change files in a way that `disk` does not know."""

TRACED = (
    *("open", "openat", "creat", "truncate", "ftruncate", "fallocate", "mmap"),
    *("sendto", "lseek", "read", "readv", "dup", "dup2", "dup3", "fcntl"),
    *(*WRITES, *SYNCS, *NAMES, *STARTS, *MOVES, *UNKNOWN),
)
"""The calls to record; strace skips names that the machine does not have."""

_LINE = re.compile(r"(\d+) +(?:<\.\.\. (\w+) resumed>)?(.*)", re.DOTALL)
_RESULT = re.compile(r"\)\s+= (-?\w+|\?)(?:<([^>]*)>)?")
_UNFINISHED = " <unfinished ...>"
_DESCRIPTOR = re.compile(r"(AT_FDCWD|-?\d+)(?:<([^>]*)>)?(\(deleted\))?")
_TEXT = re.compile(r'"([^"]*)"(\.\.\.)?')


@dataclass
class Call:
    """A system call that succeeded, a sync that failed, or a write cut off by a kill.

    ``began`` is the number of calls that had ended when this one began. ``result`` is
    negative where the call failed, or its process was killed in it. ``process`` made
    the call, ``parent`` started the process, and ``cwd`` is its current folder.
    """

    name: str
    arguments: str
    result: int
    result_path: str
    began: int
    process: int = 0
    parent: int = 0
    cwd: str = ""

    @cached_property
    def fields(self) -> list[str]:
        """The arguments, without those that contain commas."""
        return self.arguments.split(", ")

    def descriptor(self, position: int = 0) -> tuple[int, str]:
        """Return an argument that is a descriptor: its number and its path.

        The path of a file that has none any more ends with ``(deleted)``.
        """
        found = _DESCRIPTOR.match(self.fields[position])
        assert found, f"strace printed {self.name}({self.arguments[:200]})"
        number = -100 if found[1] == "AT_FDCWD" else int(found[1])
        path = _decoded(found[2] or "").decode(errors="surrogateescape")
        return number, path + (found[3] or "")

    def path(self, position: int = 0) -> str:
        """Return an argument that is a path, made absolute.

        The calls with ``at`` in their names have the folder's descriptor before it.
        """
        text = self.text(position).decode(errors="surrogateescape")
        folder = self.cwd

        if "at" in self.name.removeprefix("creat") and position:
            folder = self.descriptor(position - 1)[1]

        # POSIX lets two slashes at the start mean something else; Linux does not.
        return "/" + os.path.normpath(os.path.join(folder, text)).lstrip("/")

    def text(self, position: int) -> bytes:
        """Return an argument that is a string."""
        found = _TEXT.match(self.fields[position])
        assert found, f"strace printed {self.name}({self.arguments[:200]})"
        assert not found[2], f"strace cut a string of {self.name}"
        return _decoded(found[1])

    @cached_property
    def data(self) -> bytes:
        """What a write wrote: as many bytes as its result says."""
        found = b"".join(_decoded(text) for text, _ in _TEXT.findall(self.arguments))
        return found[: self.result]


class _Start(NamedTuple):
    """Which process started a thread or a process."""

    parent: int
    is_thread: bool


def calls(lines: Sequence[str], cwd: str) -> Iterator[Call]:
    """Yield the calls in the order in which they ended.

    ``cwd`` is the current folder of the first process.
    """
    found = [*_calls(lines)]
    # First of all, because a process may appear before the call that starts it ends.
    starts = {
        call.result: _Start(thread, "CLONE_FILES" in call.arguments)
        for thread, call in found
        if call.name in STARTS
    }
    folders: dict[int, str] = {}

    for thread, call in found:
        process = _process(thread, starts)
        parent = _process(starts[process].parent, starts) if process in starts else 0
        folder = folders.setdefault(process, folders.get(parent, cwd))
        call.process, call.parent, call.cwd = process, parent, folder

        if call.name in MOVES:
            is_path = call.name == "chdir"
            folders[process] = call.path() if is_path else call.descriptor()[1]
        elif call.name not in STARTS:
            yield call


def _process(thread: int, starts: dict[int, _Start]) -> int:
    while thread in starts and starts[thread].is_thread:
        thread = starts[thread].parent

    return thread


def _calls(lines: Iterable[str]) -> Iterator[tuple[int, Call]]:
    """Yield the calls, and the threads that made them."""
    begun: dict[str, tuple[int, str]] = {}
    ended = 0

    for line in lines:
        found = _LINE.fullmatch(line.rstrip("\n"))

        if found is None or found[3].startswith(("+++", "---")):
            continue

        thread, resumed, text = found.groups()

        if text.endswith(_UNFINISHED):
            begun[thread] = ended, text.removesuffix(_UNFINISHED)
            continue

        began = ended

        if resumed:
            began, head = begun.pop(thread)
            text = head + text

        call = _call(text, began)

        if call is not None:
            if call.name not in (*STARTS, *MOVES):
                ended += 1

            yield int(thread), call


def _call(text: str, began: int) -> Call | None:
    name, _, rest = text.partition("(")
    end = rest.rfind(")", 0, rest.rfind(" = "))
    result = _RESULT.match(rest, end)

    if result is None:
        return None  # the recording ended in this call

    is_killed = result[1] == "?"
    value = -1 if is_killed else int(result[1], 0)

    if value < 0 and name not in (WRITES if is_killed else SYNCS):
        return None

    path = _decoded(result[2] or "").decode(errors="surrogateescape")
    return Call(name, rest[:end], value, path, began)


def _decoded(text: str) -> bytes:
    # Several times as fast as bytes.fromhex without the "\\x": a trace has megabytes.
    return text.encode("ascii").decode("unicode_escape").encode("latin-1")
