"""A simulated disk, to which recorded system calls are applied."""

from __future__ import annotations

import os
import re
from typing import TypeAlias

from conformance.failure import Skip
from conformance.powerloss.files import Change, File, Folder, Link, Names, Node
from conformance.powerloss.trace import NAMES, SYNCS, UNKNOWN, WRITES, Call

__all__ = ["Contents", "Disk"]

Contents: TypeAlias = dict[str, bytes | str | None]
"""What a folder holds by path: bytes, ``None`` for a folder, a ``str`` for a link."""


class Descriptor:
    """An open file of the writer."""

    def __init__(self, flags: str) -> None:
        self.appends = "O_APPEND" in flags
        self.syncs = bool(re.search("O_D?SYNC", flags))
        self.position = 0


class Disk:
    """The files below ``root``, which had ``contents`` when the recording began.

    Raises `Skip` for changes that the recording cannot show.
    """

    def __init__(self, root: str, contents: Contents | None = None) -> None:
        self.root = Folder(root)
        self.names: list[Names] = []
        """Changes of names that are not synced, oldest first."""
        self.unsynced: dict[int, File] = {}
        """Files with changes that are not synced."""
        self.unclear: set[str] = set()
        """Files with a write in which the process was killed: it may have happened."""
        self._removed: dict[str, Node] = {}
        """Nodes that lost their name and may still be open, by ``PATH(deleted)``."""
        self._open: dict[int, dict[int, Descriptor]] = {}
        """The open files by process and descriptor."""
        self._ended = 0
        """The number of calls that have ended."""

        for path, content in sorted((contents or {}).items()):
            self._put_synced(path, content)

    @property
    def is_synced(self) -> bool:
        """Whether a power loss would lose nothing."""
        return not self.names and not self.unsynced

    def follow(self, call: Call) -> str:
        """Apply a call that has ended; return what it changed, or an empty text."""
        self._ended += 1
        # At its first call a process inherits what its parent has open at that moment.
        self._descriptors(call)

        if call.name in ("open", "openat", "creat"):
            return self._open_file(call)

        if call.name in ("lseek", "read", "readv", "dup", "dup2", "dup3", "fcntl"):
            self._move_descriptor(call)
        elif call.name in WRITES:
            return self._write(call)
        elif call.name in ("truncate", "ftruncate", "fallocate"):
            return self._resize(call)
        elif call.name in SYNCS:
            return self._sync(call)
        elif call.name in NAMES:
            return self._change_names(call)
        elif call.name == "mmap":
            self._map(call)
        elif call.name in UNKNOWN:
            raise Skip(f"not tested: the writer uses {call.name}")

        return ""

    def _descriptors(self, call: Call) -> dict[int, Descriptor]:
        """Return what the process has open; a new one has what its parent has open."""
        found = self._open.get(call.process)

        if found is None:
            found = dict(self._open.get(call.parent, {}))
            self._open[call.process] = found

        return found

    def _open_file(self, call: Call) -> str:
        flags = "O_CREAT|O_TRUNC" if call.name == "creat" else call.arguments
        path = call.result_path
        self._descriptors(call)[call.result] = Descriptor(flags)

        if not self._is_inside(path):
            return ""

        if "O_TMPFILE" in flags:
            raise Skip("not tested: the engine uses O_TMPFILE")

        if self._find(path) is None and "O_CREAT" in flags:
            return self._set_names("create", (path, File(self._short(path))))

        found = self._find(path)

        if "O_TRUNC" in flags and isinstance(found, File) and found.size:
            self._change(found, Change(0, None, self._ended))
            return f"truncate {found.path}"

        return ""

    def _move_descriptor(self, call: Call) -> None:
        descriptors = self._descriptors(call)

        if call.name in ("read", "readv"):
            opened = descriptors.get(int(call.fields[0], 0))

            if opened is not None:
                opened.position += call.result

            return

        number, _ = call.descriptor()

        if call.name == "lseek":
            descriptors.setdefault(number, Descriptor("")).position = call.result
        elif number in descriptors and (
            call.name != "fcntl" or call.fields[1].startswith("F_DUPFD")
        ):
            descriptors[call.result] = descriptors[number]

    def _write(self, call: Call) -> str:
        number, path = call.descriptor()
        file = self._file(path)

        if file is None:
            return ""

        if call.result < 0:
            self.unclear.add(file.path)
            return ""

        opened = self._descriptors(call).setdefault(number, Descriptor(""))
        data = call.data
        moves = call.name in ("write", "writev")

        if opened.appends:
            offset = file.size
        elif moves:
            offset = opened.position
        else:
            offset = int(call.fields[-2 if call.name == "pwritev2" else -1])

        if moves:
            opened.position = offset + len(data)

        durable = opened.syncs or "RWF_DSYNC" in call.fields[-1]
        self._change(file, Change(offset, data, self._ended, durable))
        return f"write {len(data)} bytes at {offset} of {file.path}"

    def _resize(self, call: Call) -> str:
        if call.name == "truncate":
            path, size = call.path(), int(call.fields[1])
        else:
            path, size = call.descriptor()[1], int(call.fields[-1])

        file = self._file(path)

        if file is None:
            return ""

        if call.name == "fallocate":
            if call.fields[1] == "FALLOC_FL_KEEP_SIZE":
                return ""

            if call.fields[1] != "0":
                raise Skip(f"not tested: the engine uses fallocate({call.fields[1]})")

            size = max(file.size, int(call.fields[2]) + size)

        self._change(file, Change(size, None, self._ended))
        return f"resize {file.path} to {size} bytes"

    def _sync(self, call: Call) -> str:
        # The others do not count as a sync: sync_file_range does not sync the size, and
        # the rest do not name a file.
        if call.name not in ("fsync", "fdatasync"):
            if call.name == "msync" and any(
                file.mapped for file in self.unsynced.values()
            ):
                raise Skip("not tested: the engine writes by mmap")

            return ""

        path = call.descriptor()[1]
        node = self._removed.get(path) or self._find(path)

        if node is None or isinstance(node, Link):
            return ""

        if isinstance(node, File) and node.mapped:
            raise Skip("not tested: the engine writes by mmap")

        fails = call.result < 0

        if isinstance(node, Folder):
            if not fails:
                self._sync_names(node, call.began)
        else:
            node.sync(call.began, fails=fails)

            if not node.pending:
                self.unsynced.pop(id(node), None)

        return f"{'fail to sync' if fails else 'sync'} {node.path}"

    def _change_names(self, call: Call) -> str:
        is_at = call.name.endswith(("at", "at2"))
        second = 3 if is_at else 1

        if call.name.startswith("symlink"):
            path = call.path(second - 1 if is_at else second)
            target = call.text(0).decode(errors="surrogateescape")
            return (
                self._set_names("create", (path, Link(target)))
                if self._is_inside(path)
                else ""
            )

        path = call.path(1 if is_at else 0)

        if call.name.startswith(("unlink", "rmdir")):
            return (
                self._set_names("remove", (path, None)) if self._is_inside(path) else ""
            )

        if call.name.startswith("mkdir"):
            made = Folder(self._short(path))
            return (
                self._set_names("create", (path, made)) if self._is_inside(path) else ""
            )

        other, node = call.path(second), self._find(path)

        if not (self._is_inside(path) or self._is_inside(other)):
            return ""

        if node is None or not self._is_inside(other):
            raise Skip(f"not tested: the engine moves files into its folder: {path}")

        what = f"{call.name} {self._short(path)} to"

        if call.name.startswith("link"):
            return self._set_names(what, (other, node))

        exchanged = self._find(other) if "RENAME_EXCHANGE" in call.arguments else None
        return self._set_names(what, (other, node), (path, exchanged))

    def _map(self, call: Call) -> None:
        if "MAP_SHARED" in call.arguments and "PROT_WRITE" in call.arguments:
            file = self._file(call.descriptor(4)[1])

            # Writes to memory are not recorded. That does no harm for a file that is
            # never synced, such as SQLite's -shm: it may have any content.
            if file is not None:
                if file.synced:
                    raise Skip("not tested: the engine writes by mmap")

                file.mapped = True
                self.unsynced[id(file)] = file

    def _change(self, file: File, change: Change) -> None:
        file.change(change)
        self.unsynced[id(file)] = file

    # Names

    def _put_synced(self, path: str, content: bytes | str | None) -> None:
        """Put a synced file, folder or link at a path; its folder must exist."""
        folder, _, name = path.rpartition("/")
        parent = self._find(f"{self.root.path}/{folder}") if folder else self.root
        assert isinstance(parent, Folder), path
        node: Node

        if content is None:
            node = Folder(path)
        elif isinstance(content, str):
            node = Link(content)
        else:
            node = File(path)
            node.durable, node.size = content, len(content)

        parent.now[name] = parent.durable[name] = node

    def _is_inside(self, path: str) -> bool:
        return path.startswith(self.root.path + "/")

    def _short(self, path: str) -> str:
        return os.path.relpath(path, self.root.path)

    def _find(self, path: str) -> Node | None:
        if path == self.root.path:
            return self.root

        if not self._is_inside(path):
            return None

        node: Node | None = self.root

        for name in self._short(path).split("/"):
            node = node.now.get(name) if isinstance(node, Folder) else None

        return node

    def _file(self, path: str) -> File | None:
        found = self._removed.get(path) or self._find(path)
        return found if isinstance(found, File) else None

    def _set_names(self, what: str, *changes: tuple[str, Node | None]) -> str:
        """Change names in one step, which a sync of the first path's folder keeps."""
        entries = []
        what = f"{what} {self._short(changes[0][0])}"

        for path, node in changes:
            folder = self._find(os.path.dirname(path))

            if not isinstance(folder, Folder):
                raise Skip(f"not tested: the writer reaches {path} by a link")

            name = os.path.basename(path)
            before = folder.now.pop(name, None)

            if before is not None:
                self._removed[f"{path}(deleted)"] = before

            if node is not None:
                folder.now[name] = node

            entries.append((folder, name, node))

        self.names.append(Names(what, self._ended, entries))
        return what

    def _sync_names(self, folder: Folder, began: int) -> None:
        waiting: list[Names] = []

        for change in self.names:
            if change.folder is not folder or change.ended > began:
                waiting.append(change)
                continue

            for where, name, node in change.entries:
                where.durable.pop(name, None)

                if node is not None:
                    where.durable[name] = node

            # This change also replaces earlier changes of the same names.
            waiting = [one for one in waiting if not one.places & change.places]

        self.names = waiting
