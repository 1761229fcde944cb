"""A session's tree as runs of entries, with uninteresting entries folded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from cpkit.sessions.entries import Entry
from cpkit.sessions.pictures.describe import Kind, describe, kind_of
from cpkit.sessions.tree import TreeNode
from cpkit.sessions.view import SessionView

__all__ = ["Item", "Run", "every_run", "outline"]


@dataclass(frozen=True)
class Item:
    """A line of a picture: one entry, or several folded entries."""

    text: str
    kind: Kind
    label: str | None
    is_active: bool
    is_leaf: bool
    order: int


@dataclass(frozen=True, eq=False)
class Run:
    """Entries that follow each other without a fork, and the runs after them."""

    items: list[Item] = field(default_factory=list)
    forks: list[Run] = field(default_factory=list, repr=False)


def outline(session: SessionView, *, everything: bool = False) -> list[Run]:
    """Return the runs that start at the roots."""
    active = {entry["id"] for entry in session.branch()}
    order = {entry["id"]: index for index, entry in enumerate(session.entries)}
    roots: list[Run] = []
    todo = [(node, roots) for node in reversed(session.tree())]

    while todo:
        node, siblings = todo.pop()
        line = [node]

        while len(node.children) == 1:
            node = node.children[0]
            line.append(node)

        run = Run()
        siblings.append(run)
        todo += [(child, run.forks) for child in reversed(node.children)]

        for group in _folded(line, everything):
            entry = group[0].entry
            is_fold = len(group) > 1
            run.items.append(
                Item(
                    f"… {len(group)} entries" if is_fold else describe(entry),
                    "fold" if is_fold else kind_of(entry),
                    group[0].label,
                    entry["id"] in active,
                    group[-1].entry["id"] == session.leaf_id,
                    order[entry["id"]],
                )
            )

    return roots


def every_run(roots: list[Run]) -> Iterator[tuple[Run, Run | None]]:
    """Yield each run with the run that it follows. Parents come first."""
    todo: list[tuple[Run, Run | None]] = [(run, None) for run in reversed(roots)]

    while todo:
        run, parent = todo.pop()
        yield run, parent
        todo += [(fork, run) for fork in reversed(run.forks)]


def _folded(line: list[TreeNode], everything: bool) -> list[list[TreeNode]]:
    """Divide a run into groups: one shown entry, or several folded entries."""
    groups: list[list[TreeNode]] = []
    folded: list[TreeNode] = []

    for index, node in enumerate(line):
        is_end = index in (0, len(line) - 1)

        if not (everything or is_end or node.label or _is_landmark(node.entry)):
            folded.append(node)
            continue

        groups += [folded, [node]] if folded else [[node]]
        folded = []

    return groups


def _is_landmark(entry: Entry) -> bool:
    return kind_of(entry) in ("user", "summary") or entry["type"] == "session_info"
