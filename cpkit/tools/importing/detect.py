"""Finding out what kind of source a path or URL is."""

from __future__ import annotations

import os
import re
from codecs import BOM_UTF8
from pathlib import Path

from cpkit.foreign_json import parse_foreign_json
from cpkit.registry import redacted
from cpkit.tools.importing.chatgpt import is_chatgpt
from cpkit.tools.importing.coding import is_claude_code, is_codex
from cpkit.tools.importing.source import BadSource
from cpkit.tools.importing.sqlite import (
    has_checkpoints,
    is_database,
    is_session_table,
    is_too_old,
    read_snapshot,
    tables_of,
)

__all__ = ["KINDS", "checked", "files_of", "local"]

KINDS = (
    "langgraph-sqlite",
    "langgraph-postgres",
    "openai-agents",
    "chatgpt",
    "claude-code",
    "codex",
    "sessions",
    "transcripts",
)

_TEXT_KINDS = KINDS[3:]

# How much of a file is read to detect its kind; a session's header is far shorter.
_HEAD_BYTES = 1 << 20


def checked(source: str, kind: str | None) -> str:
    """Return the kind of a source; without ``kind``, detect it from the content.

    It blocks. Raises `BadSource` if the source cannot be read as that kind, or if
    several kinds fit.
    """
    if kind is not None and kind not in KINDS:
        raise BadSource(f"unknown kind {kind!r}; the kinds are {', '.join(KINDS)}")

    try:
        if kind is None:
            return _detected(source)

        if kind == "langgraph-postgres":
            if not _is_postgres(source):
                raise BadSource(f"{kind} is read from a postgresql:// URL")

            return kind

        path = local(source)

        if kind in _TEXT_KINDS and is_database(path):
            raise BadSource(f"{source}: a SQLite database, not a file of {kind}")
    except OSError as exc:
        raise BadSource(f"{source}: {exc.strerror or exc}") from exc

    return kind


def local(source: str) -> Path:
    """Return the source's path; raise `BadSource` if it cannot be read."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", source):
        raise BadSource(
            "a source is a file, a folder or a postgresql:// URL; to copy from one "
            "cpkit store to another there is 'cpkit copy'"
        )

    if not source:
        # For pathlib it would be the current folder.
        raise BadSource("the name of the source is empty")

    path = Path(source).expanduser()

    if not path.exists():
        raise BadSource(f"{redacted(source)}: no such file or folder")

    if not os.access(path, os.R_OK):
        raise BadSource(f"{source}: not readable")

    return path


def files_of(path: Path) -> list[Path]:
    """Return the file, or all ``*.jsonl`` files below the folder, sorted."""
    if not path.is_dir():
        return [path]

    # Not rglob, which skips a folder that cannot be read without a word.
    files = sorted(
        file
        for folder, _, names in os.walk(path, onerror=_refuse)
        for file in map(Path(folder).joinpath, names)
        if file.name.endswith(".jsonl") and file.is_file()
    )

    if not files:
        raise BadSource(f"{path}: no *.jsonl file in this folder")

    return files


def _refuse(exc: OSError) -> None:
    raise BadSource(f"{exc.filename}: {exc.strerror}") from exc


def _is_postgres(source: str) -> bool:
    return re.match(r"postgres(ql)?://", source) is not None


def _detected(source: str) -> str:
    if _is_postgres(source):
        return "langgraph-postgres"

    path = local(source)

    if not (path.is_file() or path.is_dir()):
        # To look at a pipe's first lines would take them off.
        raise BadSource(f"{source}: neither a file nor a folder; give its --kind")

    if is_database(path):
        return _kind_of_database(path)

    # The first file with a recognized line decides for the whole folder.
    for file_path in files_of(path):
        if (kind := _kind_of_lines(file_path)) is not None:
            return kind

    raise BadSource(
        f"{source}: neither a SQLite file, nor JSONL of sessions or chat messages; "
        "--kind says what it is"
    )


def _kind_of_database(path: Path) -> str:
    with read_snapshot(path) as connection:
        tables = tables_of(connection)

    kinds = []

    if has_checkpoints(tables):
        kinds.append("langgraph-sqlite")

    if any(map(is_session_table, tables.values())):
        kinds.append("openai-agents")

    if len(kinds) == 1:
        return kinds[0]

    if kinds:
        raise BadSource(f"{path}: it is {' and '.join(kinds)}; --kind says which")

    if is_too_old(tables):
        raise BadSource(
            f"{path}: checkpoints of LangGraph before 0.2 (2024) are pickled, and are "
            "not read"
        )

    known = "checkpoints of LangGraph or sessions of the OpenAI Agents SDK"
    raise BadSource(f"{path}: a SQLite file without {known}")


def _kind_of_lines(path: Path) -> str | None:
    if path.is_file() and not path.stat().st_size:
        # It may be a database that is being created: only SQLite may open it.
        return None

    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES).removeprefix(BOM_UTF8)

    if is_chatgpt(head):
        return "chatgpt"

    for text in head.split(b"\n"):
        if not text.strip():
            continue

        try:
            line = parse_foreign_json(text)
        except ValueError:
            # A long first line is cut off, but its beginning shows the kind.
            return "transcripts" if b'"messages"' in text[:1000] else None

        if isinstance(line, dict) and "cpkit_export" in line:
            raise BadSource(f"{path}: an export of cpkit; 'cpkit copy' reads exports")

        if isinstance(line, dict) and line.get("type") == "session":
            return "sessions"

        if is_claude_code(line):
            return "claude-code"

        if is_codex(line):
            return "codex"

        if isinstance(line, list) or (
            isinstance(line, dict) and ("messages" in line or "role" in line)
        ):
            return "transcripts"

        # Claude Code may begin with lines of other forms.
        if not isinstance(line, dict) or "type" not in line:
            return None

    return None
