"""OpenAI-format transcripts in JSONL files: chat messages, as they are.

A line is a conversation, ``{"messages": [...]}`` or the list alone, or each line is a
message and the file the conversation. A conversation's thread is its ``thread_id``,
``conversation_id``, ``session_id`` or ``id``, or else the file's name with the number
of its line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpkit.driver.ids import check_id
from cpkit.driver.jsontext import encode_json, parse_json
from cpkit.errors import CheckpointerError
from cpkit.tools.importing.source import Found, Left, Thread

__all__ = ["read_transcripts"]

TORN = "a last line that was not finished"

NAMES = ("thread_id", "conversation_id", "session_id", "id")


def read_transcripts(files: list[Path], *, skip_corrupt: bool) -> Iterator[Found]:
    """Yield the conversations of the files, in the order of files and lines.

    With ``skip_corrupt`` a conversation of which each line is a message comes without
    the lines that are none; otherwise it is left.
    """
    for path in files:
        yield from _read(path, skip_corrupt)


def _read(path: Path, skip_corrupt: bool) -> Iterator[Found]:
    messages: list[dict[str, Any]] = []
    flaws: list[Left] = []
    is_by_line = False

    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue

            line, reason = _parsed(text)

            if reason is not None:
                flaws.append(Left(f"{path.name}, line {number}", reason))
            elif _is_message(line):
                messages.append(line)
            else:
                is_by_line = True
                yield from _conversation(path, number, line)

    if messages:
        yield from _loose(path, messages, flaws, skip_corrupt)
    elif is_by_line:
        # Each of these lines would have been a conversation.
        yield from (Left(flaw.name, flaw.reason, is_thread=True) for flaw in flaws)
    else:
        yield Left(path.name, "no chat messages in this file", is_thread=True)


def _parsed(text: bytes) -> tuple[Any, str | None]:
    """Return what a line says, or why it says nothing that could be imported."""
    try:
        line = parse_json(text)
        encode_json(line, ())
    except (ValueError, CheckpointerError):
        return None, "no JSON" if text.endswith(b"\n") else TORN

    if _is_message(line) or isinstance(line, list):
        return line, None

    if isinstance(line, dict) and "messages" in line:
        return line, None

    return None, "neither messages nor a message with a role"


def _loose(
    path: Path,
    messages: list[dict[str, Any]],
    flaws: list[Left],
    skip_corrupt: bool,
) -> Iterator[Found]:
    """Yield the conversation of a file of which each line is a message."""
    yield from flaws
    corrupt = [flaw for flaw in flaws if flaw.reason != TORN]

    if corrupt and not skip_corrupt:
        reason = "a file with corrupt lines; --skip-corrupt brings the others"
        yield Left(path.name, reason, is_thread=True)
    else:
        yield from _thread(path.name, path.stem, messages)


def _conversation(path: Path, number: int, line: Any) -> Iterator[Found]:
    """Yield one line's conversation, and what it has that a thread has no place for."""
    name = f"{path.name}, line {number}"
    fields = line if isinstance(line, dict) else {"messages": line}
    given = next((fields[n] for n in NAMES if isinstance(fields.get(n), str)), None)
    messages = fields["messages"]

    if not isinstance(messages, list) or not messages:
        yield Left(name, "no messages", is_thread=True)
        return

    if not all(map(_is_message, messages)):
        yield Left(name, "a message without a role", is_thread=True)
        return

    for field in sorted(fields.keys() - {"messages", *NAMES}):
        yield Left(name, f"field {field!r} is no message")

    yield from _thread(
        name, f"{path.stem}:{number}" if given is None else given, messages
    )


def _thread(
    name: str, thread_id: str, messages: list[dict[str, Any]]
) -> Iterator[Found]:
    try:
        yield Thread(name, check_id("thread id", thread_id), messages)
    except CheckpointerError as exc:
        yield Left(name, str(exc), is_thread=True)


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)
