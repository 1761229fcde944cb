"""OpenAI-format transcripts in JSONL files: chat messages, stored unchanged.

Either each line is a conversation, ``{"messages": [...]}`` or only the list, or each
line is a message and the file is the conversation. A conversation's thread id is its
``thread_id``, ``conversation_id``, ``session_id`` or ``id``. Without one, it is the
file's name with the number of the line.

A line or a message that cannot be stored does not cost its neighbours: a system message
in its place says what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpkit.driver.ids import check_id
from cpkit.errors import CheckpointerError
from cpkit.fitting import placeholder
from cpkit.toolcalls import read_message
from cpkit.tools.importing.source import (
    Found,
    Left,
    Thread,
    numbered_lines,
    parsed,
)

__all__ = ["read_transcripts"]

TORN = "a last line that was not finished"

_ID_FIELDS = ("thread_id", "conversation_id", "session_id", "id")


def read_transcripts(files: list[Path], *, skip_corrupt: bool) -> Iterator[Found]:
    """Yield the conversations of the files, in the order of files and lines.

    ``skip_corrupt`` is for files with one message on each line: lines that are not
    messages are left out. Otherwise a message in the place of each says so.
    """
    made: set[str] = set()

    for path in files:
        yield from _read(path, skip_corrupt, made)


def _read(path: Path, skip_corrupt: bool, made: set[str]) -> Iterator[Found]:
    """Yield the conversations of a file; ``made`` has the ids made of file names."""
    messages: list[dict[str, Any]] = []
    flaws: list[Left] = []
    is_talk = has_conversations = False

    with path.open("rb") as file:
        for number, text in numbered_lines(file):
            line, missing = _line(text)
            name = f"{path.name}, line {number}"

            if line is None:
                flaws += [Left(name, reason) for reason in missing]

                if missing != [TORN] and not skip_corrupt:
                    messages.append(_message_for(f"line {number}: {missing[0]}"))

                continue

            yield from (Left(name, reason) for reason in missing)

            if _is_message(line):
                is_talk = True
                messages.append(line)
            else:
                has_conversations = True
                yield from _conversation(path, number, line, made)

    if is_talk:
        yield from flaws
        yield from _named_by_file(path, path.name, path.stem, messages, made)
    elif has_conversations:
        # Each of the damaged lines is a conversation that is left.
        yield from (Left(flaw.name, flaw.reason, is_thread=True) for flaw in flaws)
    else:
        yield Left(path.name, "no chat messages in this file", is_thread=True)


def _line(text: bytes) -> tuple[Any, list[str]]:
    """Return the line's value, and what is missing; ``None`` if that is all of it."""
    try:
        line, missing = parsed(text)
    except ValueError:
        return None, ["not JSON" if text.endswith(b"\n") else TORN]

    if _is_message(line) or isinstance(line, list):
        return line, missing

    if isinstance(line, dict) and "messages" in line:
        return line, missing

    return None, ["neither messages nor a message with a role"]


def _message_for(reason: str) -> dict[str, Any]:
    return {"role": "system", "content": placeholder(reason)}


def _conversation(
    path: Path, number: int, line: Any, made: set[str]
) -> Iterator[Found]:
    """Yield one line's conversation, and its fields that a thread cannot store."""
    name = f"{path.name}, line {number}"
    fields = line if isinstance(line, dict) else {"messages": line}
    given = next(
        (fields[n] for n in _ID_FIELDS if isinstance(fields.get(n), str)), None
    )
    messages = fields["messages"]

    if not isinstance(messages, list) or not messages:
        yield Left(name, "no messages", is_thread=True)
        return

    if not any(map(_is_message, messages)):
        yield Left(name, "a message without a role", is_thread=True)
        return

    stored = []

    for place, message in enumerate(messages):
        if isinstance(message, dict):
            stored.append(message)
        else:
            reason = f"message {place} is not an object"
            stored.append(_message_for(reason))
            yield Left(name, reason)

    messages = stored

    for field in sorted(fields.keys() - {"messages", *_ID_FIELDS}):
        yield Left(name, f"field {field!r} is not a message")

    if given is None:
        thread_id = f"{path.stem}:{number}"
        yield from _named_by_file(path, name, thread_id, messages, made)
    else:
        yield from _thread(name, given, messages)


def _named_by_file(
    path: Path,
    name: str,
    thread_id: str,
    messages: list[dict[str, Any]],
    made: set[str],
) -> Iterator[Found]:
    """Yield a conversation, unless a file of another folder has given its id away."""
    if thread_id in made:
        reason = f"another file has made the thread {thread_id!r}; rename this one"
        yield Left(name.replace(path.name, str(path), 1), reason, is_thread=True)
    else:
        made.add(thread_id)
        yield from _thread(name, thread_id, messages)


def _thread(
    name: str, thread_id: str, messages: list[dict[str, Any]]
) -> Iterator[Found]:
    try:
        yield Thread(name, check_id("thread id", thread_id), messages)
    except CheckpointerError as exc:
        yield Left(name, str(exc), is_thread=True)
        return

    unknown = {form for one in messages for form in read_message(one).unknown}

    for form in sorted(unknown):
        reason = f"a tool call in an unknown form ({form}) is stored unchanged"
        yield Left(name, reason)


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)
