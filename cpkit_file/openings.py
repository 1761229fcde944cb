"""Files that are opened and locked, and stay open between operations.

Locks are ``flock``'s. They belong to one opening of a file, so they hold between two
threads of a process as between two processes, and they end with it, however it ends.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from cpkit_file.descriptors import fcntl

if TYPE_CHECKING:
    from cpkit_file.index import LogIndex

__all__ = ["Opening", "Openings"]


class Opening:
    """A file that is open; no symbolic link is followed.

    ``size`` is what it had when it was locked, and ``index`` what is remembered of it:
    as long as it is open, no other file has its inode.
    """

    __slots__ = ("_inode", "fd", "index", "path", "size", "writable")

    def __init__(self, path: str, flags: int) -> None:
        # What is created is for its owner alone.
        self.fd = os.open(path, flags | os.O_NOFOLLOW, 0o600)
        self.path = path
        self.writable = bool(flags & os.O_RDWR)
        self.size = 0
        self.index: LogIndex | None = None
        self._inode: tuple[int, int] | None = None

    def lock(self, how: int) -> bool:
        """Lock the file; closed, and ``False``, where another is in its place by now.

        Closed too where that raises.
        """
        try:
            fcntl.flock(self.fd, how)

            if self._inode is None:
                ours = os.fstat(self.fd)
                self._inode = ours.st_dev, ours.st_ino

            there = os.lstat(self.path)
        except FileNotFoundError:
            self.close()
            return False
        except BaseException:
            self.close()
            raise

        if (there.st_dev, there.st_ino) != self._inode:
            self.close()
            return False

        self.size = there.st_size
        return True

    def unlock(self) -> None:
        """Let go of the lock and keep the file open."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the lock and close the file.

        Closing alone leaves the lock to a child that was forked meanwhile.
        """
        try:
            self.unlock()
        finally:
            os.close(self.fd)


class Openings:
    """Opens files, and keeps some of them open for who needs them next.

    One that is in use is not in here, so nobody else comes to share its lock; who needs
    the same file meanwhile opens it again. All are closed where the process has no
    descriptors left. Several threads may use this at once: each step is a single
    operation of the dictionary.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle: OrderedDict[str, Opening] = OrderedDict()

    def shared(self, path: str) -> Opening:
        """Open a file to read it, and keep writers out until it is unlocked."""
        return self._locked(path, os.O_RDONLY, fcntl.LOCK_SH)

    def exclusive(self, path: str, *, create: bool, wait: bool = True) -> Opening:
        """Open a file to append to it, and keep all others out until it is unlocked.

        Raises ``BlockingIOError`` where somebody has it, unless ``wait``.
        """
        flags = os.O_RDWR | os.O_APPEND | (os.O_CREAT if create else 0)
        return self._locked(path, flags, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))

    @contextmanager
    def exclusive_directory(self, path: str) -> Iterator[int]:
        """Hold a directory's lock for the time of the block."""
        directory = self._locked(path, os.O_RDONLY | os.O_DIRECTORY, fcntl.LOCK_EX)

        try:
            yield directory.fd
            directory.unlock()
        except BaseException:
            directory.close()
            raise

        self.keep(directory)

    def keep(self, opening: Opening) -> None:
        """Keep an unlocked file open as long as there is room."""
        if self._idle.setdefault(opening.path, opening) is not opening:
            os.close(opening.fd)
        elif len(self._idle) > self._limit:
            self._close_oldest()

    def close(self) -> None:
        """Close what nobody uses."""
        while self._idle:
            self._close_oldest()

    def __del__(self) -> None:
        self.close()  # of a handle that was not closed

    def _close_oldest(self) -> None:
        with suppress(KeyError):  # others were quicker
            os.close(self._idle.popitem(last=False)[1].fd)

    def _locked(self, path: str, flags: int, how: int) -> Opening:
        while True:
            opening = self._idle.pop(path, None)

            if opening is not None and flags & os.O_RDWR and not opening.writable:
                os.close(opening.fd)
                opening = None

            opening = opening or self._opened(path, flags)

            if opening.lock(how):
                return opening

    def _opened(self, path: str, flags: int) -> Opening:
        try:
            return Opening(path, flags)
        except OSError as exc:
            if exc.errno not in (errno.EMFILE, errno.ENFILE) or not self._idle:
                raise

        self.close()
        return Opening(path, flags)
