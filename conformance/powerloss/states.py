"""The states of a disk that a power loss can leave at one instant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

from conformance.powerloss.disk import Contents, Disk
from conformance.powerloss.files import File, Folder, Link, Names, Node

__all__ = ["VARIANTS", "State", "state"]

VARIANTS = ("nothing unsynced", "everything", "names", "contents", "a mixture")
"""What a state holds beyond what is synced."""

_TRIES = 4
"""Draws of a torn file: most are whole, where one small write is not synced."""

_SHOWN = 12
"""How many unsynced changes a description lists."""


class State(NamedTuple):
    """What a disk holds, and what of it was not synced."""

    contents: Contents
    what: str
    torn: bool = False
    """Whether the unsynced changes of a file are there in part."""

    def write(self, folder: Path) -> None:
        """Make the files in an empty folder."""
        for path, content in self.contents.items():
            place = folder / path

            if content is None:
                place.mkdir(mode=0o700)
            elif isinstance(content, str):
                place.symlink_to(content)
            else:
                place.write_bytes(content)
                place.chmod(0o600)


def state(
    disk: Disk,
    variant: str,
    random: Random,
    *,
    in_order: bool = False,
    names_in_order: bool = False,
) -> State:
    """Return one state: synced is everything that was, and the variant of the rest.

    ``in_order``: what is not synced of a file is cut, and has no holes.
    ``names_in_order``: of the names that are not synced, the first ones are there.
    """
    names: list[Names] = []

    if variant in ("everything", "names"):
        names = disk.names
    elif variant == "a mixture":
        names = _some(disk.names, random, names_in_order)

    def lost(file: File) -> bytes:
        return file.lost()

    torn = False

    def mixed(file: File) -> bytes:
        nonlocal torn

        if file.mapped:
            return random.choice((b"", bytes(file.size)))

        if not file.pending:
            return file.durable

        if (how := random.choice((File.lost, File.kept, None, None))) is not None:
            return how(file)

        tear, whole = File.cut if in_order else File.torn, (file.lost(), file.kept())

        for _ in range(_TRIES):
            found = tear(file, random)

            if found not in whole:
                torn = True
                break

        return found

    content: Callable[[File], bytes] = {
        "everything": File.kept,
        "contents": File.kept,
        "a mixture": mixed,
    }.get(variant, lost)
    contents = _tree(disk.root, names, content)
    return State(contents, _description(disk, variant, names), torn)


def _some(names: list[Names], random: Random, in_order: bool) -> list[Names]:
    """Return changes that reached the disk: the first ones, or any.

    Changes of one name reach it in their order.
    """
    if random.random() < 0.5 or in_order:
        return names[: random.randint(0, len(names))]

    chosen = []
    missing: set[tuple[int, str]] = set()

    for change in names:
        if random.random() < 0.5 and not change.places & missing:
            chosen.append(change)
        else:
            missing |= change.places

    return chosen


def _tree(
    root: Folder, names: list[Names], content: Callable[[File], bytes]
) -> Contents:
    changed: dict[int, dict[str, Node]] = {}

    for change in names:
        for folder, name, node in change.entries:
            entries = changed.setdefault(id(folder), dict(folder.durable))
            entries.pop(name, None)

            if node is not None:
                entries[name] = node

    found: Contents = {}
    pending = [("", root)]

    while pending:
        at, folder = pending.pop()

        for name, node in changed.get(id(folder), folder.durable).items():
            path = at + name

            if isinstance(node, Folder):
                found[path] = None
                pending.append((path + "/", node))
            elif isinstance(node, Link):
                found[path] = node.target
            else:
                found[path] = content(node)

    return found


def _description(disk: Disk, variant: str, names: list[Names]) -> str:
    """Return what was not synced, and how much of it is in the state."""
    lines = [
        f"not synced, and {'kept' if change in names else 'lost'}: {change.what}"
        for change in disk.names
    ]

    for file in disk.unsynced.values():
        changes = [str(change) for change in file.pending if not change.durable]

        if changes and not file.mapped:
            kept = {
                "everything": "kept",
                "contents": "kept",
                "a mixture": "kept in part",
            }
            shown = ", ".join(changes[-4:])
            lines.append(
                f"not synced, and {kept.get(variant, 'lost')}: {shown} of {file.path}"
            )

    if not lines:
        return "everything was synced"

    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join(lines[-_SHOWN:] + more)
