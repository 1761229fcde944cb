"""Transcripts of Claude Code and of Codex: JSONL files, with every line kept.

A file of Claude Code becomes what `ClaudeSessionStore` of cpkit reads under the key
that the Claude Agent SDK gives the file: ``PROJECT/SESSION.jsonl``, or
``PROJECT/SESSION/subagents/….jsonl``. A subagent's metadata is its first entry. A file
of Codex becomes a thread of its lines, unchanged, under the session's own id. Neither
program is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from cpkit.driver.ids import check_id
from cpkit.errors import CheckpointerError
from cpkit.fitting import placeholder
from cpkit.integrations.claude_thread import transcript_thread
from cpkit.tools.importing.source import (
    Found,
    Left,
    Thread,
    numbered_lines,
    parsed,
)
from cpkit.tools.importing.transcripts import TORN

__all__ = ["is_claude_code", "is_codex", "read_claude_code", "read_codex"]

Line = dict[str, Any]
Lost = Callable[[int, str], Line]

# The first lines of a file of Claude Code may be of any of these forms.
_CLAUDE_FIELDS = {"sessionId", "parentUuid", "leafUuid", "isSnapshotUpdate"}

_CODEX_TYPES = {"session_meta", "response_item", "event_msg", "turn_context"}


def is_claude_code(line: Any) -> bool:
    """Return whether this is a line of a transcript of Claude Code."""
    is_typed = isinstance(line, dict) and isinstance(line.get("type"), str)
    return is_typed and not _CLAUDE_FIELDS.isdisjoint(line)


def is_codex(line: Any) -> bool:
    """Return whether this is a line of Codex; until 2025 the first had no type."""
    if not isinstance(line, dict):
        return False

    if line.get("type") in _CODEX_TYPES:
        return isinstance(line.get("payload"), dict)

    return {"id", "timestamp", "instructions"} <= line.keys()


def read_claude_code(files: list[Path], *, skip_corrupt: bool) -> Iterator[Found]:
    """Yield one transcript for each file, sessions and subagents."""
    for path in files:
        lines, flaws = _read(path, skip_corrupt, _lost_entry)
        yield from flaws
        _link(lines)
        records = [{"entry": line, "by": f"line {n}"} for n, line in lines]

        if (metadata := _metadata(path)) is not None:
            records.insert(0, {"entry": metadata, "by": "metadata"})

        yield _thread(path, lambda at: transcript_thread(_key(at)), records)


def read_codex(files: list[Path], *, skip_corrupt: bool) -> Iterator[Found]:
    """Yield one session for each file."""
    for path in files:
        lines, flaws = _read(path, skip_corrupt, _lost_event)
        yield from flaws
        messages = [line for _, line in lines]
        yield _thread(path, partial(_session_id, messages), messages)


def _thread(path: Path, thread_id: Callable[[Path], str], messages: list[Any]) -> Found:
    if not messages:
        return Left(path.name, "no lines in this file", is_thread=True)

    try:
        return Thread(path.name, thread_id(path), messages)
    except CheckpointerError as exc:
        return Left(path.name, str(exc), is_thread=True)


def _read(
    path: Path, skip_corrupt: bool, lost: Lost
) -> tuple[list[tuple[int, Line]], list[Left]]:
    """Return the lines with their numbers, and what is missing in them.

    ``lost`` makes a line of the number and the reason, for one that is not an object.
    """
    lines: list[tuple[int, Line]] = []
    flaws: list[Left] = []

    with path.open("rb") as file:
        for number, text in numbered_lines(file):
            try:
                line, missing = parsed(text)
            except ValueError:
                line, missing = None, ["not JSON" if text.endswith(b"\n") else TORN]

            if not isinstance(line, dict):
                missing = missing or ["not an object"]

                if skip_corrupt or missing == [TORN]:
                    line = None
                else:
                    line = lost(number, missing[0])

            flaws += [Left(f"{path.name}, line {number}", one) for one in missing]

            if line is not None:
                lines.append((number, line))

    return lines, flaws


# Claude Code


def _key(path: Path) -> dict[str, str]:
    *folders, name = path.resolve().with_suffix("").parts

    if "subagents" not in folders[2:]:
        return {"project_key": folders[-1].strip("/\\"), "session_id": name}

    start = len(folders) - 1 - folders[::-1].index("subagents")
    return {
        "project_key": folders[start - 2],
        "session_id": folders[start - 1],
        "subpath": "/".join([*folders[start:], name]),
    }


def _metadata(path: Path) -> Line | None:
    """Return the entry that the SDK makes of a subagent's other file, if it has one."""
    try:
        found, _ = parsed(path.with_suffix(".meta.json").read_bytes())
    except (OSError, ValueError):
        return None

    return {**found, "type": "agent_metadata"} if isinstance(found, dict) else None


def _lost_entry(number: int, reason: str) -> Line:
    text = placeholder(f"line {number}: {reason}")
    return {"type": "system", "subtype": "informational", "content": text}


def _link(lines: list[tuple[int, Line]]) -> None:
    """Give an entry in the place of a lost one the uuid that a later entry follows."""
    uuids = {line.get("uuid") for _, line in lines}
    lost: Line | None = None
    before: Line = {}

    for _, line in lines:
        parent = line.get("parentUuid")

        if line.keys() == {"type", "subtype", "content"}:
            lost = line
        elif isinstance(parent, str) and parent not in uuids and lost is not None:
            fields = ("sessionId", "timestamp", "cwd", "version")
            lost |= {name: before[name] for name in fields if name in before}
            lost |= {"uuid": parent, "parentUuid": before.get("uuid")}
            uuids.add(parent)
            lost = None

        if "uuid" in line:
            before = line


# Codex


def _session_id(lines: list[Line], path: Path) -> str:
    for line in lines:
        fields = line.get("payload") if line.get("type") == "session_meta" else line

        if isinstance(fields, dict) and isinstance(fields.get("id"), str):
            return check_id("session id", fields["id"])

        if line.get("type") in _CODEX_TYPES - {"session_meta"}:
            break

    return check_id("session id", path.stem)


def _lost_event(number: int, reason: str) -> Line:
    text = placeholder(f"line {number}: {reason}")
    return {"type": "event_msg", "payload": {"type": "warning", "message": text}}
