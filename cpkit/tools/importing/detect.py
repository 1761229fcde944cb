"""Telling what a source is by looking at it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cpkit.driver.jsontext import parse_json
from cpkit.tools.importing.langgraph import is_checkpoints
from cpkit.tools.importing.openai_agents import is_sessions
from cpkit.tools.importing.source import BadSource
from cpkit.tools.importing.sqlite import MAGIC, columns, opened

__all__ = ["KINDS", "checked", "files_of", "local"]

KINDS = (
    "langgraph-sqlite",
    "langgraph-postgres",
    "openai-agents",
    "sessions",
    "transcripts",
)


HEAD = 1 << 20
"""Bytes of a file that are looked at; a session's header is far shorter."""


def _is_postgres(source: str) -> bool:
    """Tell whether the source is the URL of a Postgres database."""
    return re.match(r"postgres(ql)?://", source) is not None


def local(source: str) -> Path:
    """Return the source's path; raise `BadSource` where nothing is there."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", source):
        raise BadSource(
            "a source is a file, a folder or a postgresql:// URL; to copy from one "
            "cpkit store to another there is 'cpkit copy'"
        )

    path = Path(source).expanduser()

    if not path.exists():
        raise BadSource(f"{source}: no such file or folder")

    if not os.access(path, os.R_OK):
        raise BadSource(f"{source}: not readable")

    return path


def files_of(path: Path) -> list[Path]:
    """Return the file, or the folder's ``*.jsonl`` files with those below, sorted."""
    if not path.is_dir():
        return [path]

    files = sorted(file for file in path.rglob("*.jsonl") if file.is_file())

    if not files:
        raise BadSource(f"{path}: no *.jsonl file in this folder")

    return files


def checked(source: str, kind: str | None) -> str:
    """Return the kind of a source, by a look at it where none is given.

    It blocks. Raises `BadSource` where it is none, or several.
    """
    if kind is not None and kind not in KINDS:
        raise BadSource(f"no kind {kind!r}; there are {', '.join(KINDS)}")

    try:
        if kind is None:
            return _kind_of(source)

        if kind != "langgraph-postgres":
            local(source)
        elif not _is_postgres(source):
            raise BadSource("langgraph-postgres is read from a postgresql:// URL")
    except OSError as exc:
        raise BadSource(f"{source}: {exc.strerror or exc}") from exc

    return kind


def _kind_of(source: str) -> str:
    if _is_postgres(source):
        return "langgraph-postgres"

    path = local(source)

    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return _kind_of_database(path)

    # A folder is what the first of its files is that is anything.
    for file_path in files_of(path):
        if (kind := _kind_of_lines(file_path)) is not None:
            return kind

    raise BadSource(
        f"{source}: neither a SQLite file, nor JSONL of sessions or chat messages; "
        "--kind says what it is"
    )


def _kind_of_database(path: Path) -> str:
    with opened(path) as connection:
        tables = columns(connection)

    kinds = [
        kind
        for kind, is_kind in (
            ("langgraph-sqlite", is_checkpoints(tables)),
            ("openai-agents", is_sessions(tables)),
        )
        if is_kind
    ]

    if len(kinds) == 1:
        return kinds[0]

    if kinds:
        raise BadSource(f"{path}: it is {' and '.join(kinds)}; --kind says which")

    known = "checkpoints of LangGraph or sessions of the OpenAI Agents SDK"
    raise BadSource(f"{path}: a SQLite file without {known}")


def _kind_of_lines(path: Path) -> str | None:
    with path.open("rb") as file:
        for text in file.read(HEAD).split(b"\n"):
            if not text.strip():
                continue

            try:
                line = parse_json(text)
            except ValueError:
                # A long first line is cut; how it begins says enough.
                return "transcripts" if b'"messages"' in text[:1000] else None

            if isinstance(line, dict) and "cpkit_export" in line:
                raise BadSource(f"{path}: an export of cpkit; 'cpkit copy' brings it")

            if isinstance(line, dict) and line.get("type") == "session":
                return "sessions"

            is_chat = isinstance(line, list) or (
                isinstance(line, dict) and ("messages" in line or "role" in line)
            )
            return "transcripts" if is_chat else None

    return None
