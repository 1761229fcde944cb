"""``cpkit show``: print a thread's messages, extra and pending calls."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated, Any

import typer
from rich.text import Text

from cpkit.cli.calls import call_rows
from cpkit.cli.output import (
    one_line,
    print_json,
    print_table,
    printable,
    stdout,
    write,
)
from cpkit.cli.running import run
from cpkit.cli.stores import Json, no_thread, open_store, split_words
from cpkit.protocol import ReadsRanges
from cpkit.records import CheckpointData
from cpkit.toolcalls import Call, Result, read_message, read_part, unwrap
from cpkit.tools.copying.exports import call_as_json
from cpkit.tools.formats import counted

__all__ = ["Words", "in_short", "show"]

Words = Annotated[
    list[str],
    typer.Argument(
        help="The store's URL, unless CPKIT_URL is set, and the thread's id.",
        metavar="[URL] THREAD",
        show_default=False,
    ),
]
Last = Annotated[
    int, typer.Option(help="How many of the last messages to print.", min=0)
]
Full = Annotated[
    bool,
    typer.Option("--full", help="Print messages as JSON, without shortening them."),
]

# Characters of a message in a table.
_SHORT = 400


def show(words: Words, last: Last = 20, full: Full = False, json: Json = False) -> None:
    """Print a thread's last messages, extra and pending calls."""
    thread_id, data = run(_load(words, last))
    messages = data.messages
    first = data.version - len(messages)

    if json:
        print_json(
            {
                "thread_id": thread_id,
                "version": data.version,
                "first": first,
                "messages": messages,
                "extra": data.extra,
                "pending": [call_as_json(one) for one in data.pending],
            }
        )
        return

    console = stdout()
    count = counted(data.version, "message")
    shown = f", from {first} on" if first else ""
    console.print(Text(f"{printable(thread_id)}: {count}{shown}", "bold"))

    if full:
        # Not through rich, which takes as long as the rest of the command.
        dim, plain = ("\x1b[2m", "\x1b[0m") if console.color_system else ("", "")

        for position, message in enumerate(messages, first):
            write(f"\n{dim}{position}{plain}\n{_pretty(message)}\n", flush=False)
    elif messages:
        print_table(
            ["", "role", "message"],
            [
                (position, *in_short(message))
                for position, message in enumerate(messages, first)
            ],
        )

    if data.extra:
        console.print()
        print_table(
            ["extra", "value"],
            [
                (key, one_line(jsonlib.dumps(value, ensure_ascii=False), _SHORT))
                for key, value in data.extra.items()
            ],
        )

    if data.pending:
        console.print()
        print_table(*call_rows(data.pending))


async def _load(words: list[str], last: int) -> tuple[str, CheckpointData[Any]]:
    url, thread_id = split_words(words, "THREAD")

    async with open_store(url, ReadsRanges) as cp:
        data = await cp.load_range(thread_id, -last, None if last else 0)

    if data is None:
        raise no_thread(url, thread_id)

    return thread_id, data


def in_short(message: Any) -> tuple[str, str]:
    """Return a message's role or type, and its text, calls and results."""
    wrapper, inner = unwrap(message)

    if not isinstance(inner, dict):
        return "", one_line(message, _SHORT)

    for name in ("role", "kind", "type"):
        if isinstance(inner.get(name), str):
            rest = {key: value for key, value in inner.items() if key != name}
            return one_line(inner[name], 30), one_line(_words(message, rest), _SHORT)

    return "", one_line(_words(message, inner) if wrapper else message, _SHORT)


def _words(message: Any, rest: dict[str, Any]) -> str:
    """Return a message's text, calls and results, and its other fields as JSON."""
    reading = read_message(message)
    words = [f"→ {one.tool_name} {_json(one.args)}" for one in reading.calls]
    words += [_text(one.content) or _json(one.content) for one in reading.results]
    words += [f"a tool call in an unknown form: {one}" for one in reading.unknown]

    if words:
        text = _text(rest.get("content")) if not reading.results else None
        return " ".join([text, *words] if text else words)

    text = _text(rest.get("content"))

    if text is None:
        return one_line(rest, _SHORT) if rest else ""

    more = {key: value for key, value in rest.items() if key != "content"}
    return f"{text} {one_line(more, _SHORT)}" if more else text


def _json(value: Any) -> str:
    if isinstance(value, str):
        return value

    return "" if value is None else jsonlib.dumps(value, ensure_ascii=False)


def _text(content: Any) -> str | None:
    """Return the text of a message's content; a part without text is its type."""
    if isinstance(content, str):
        return content

    if not isinstance(content, list):
        return None

    parts = []

    for part in content:
        if not isinstance(part, dict):
            return None

        text = part.get("text")

        # Calls stand behind the text, with their arguments.
        if not isinstance(read_part(part), Call | Result):
            kind = f"[{part.get('type', '…')}]"
            parts.append(text if isinstance(text, str) else kind)

    return " ".join(parts)


def _pretty(message: Any) -> str:
    text = jsonlib.dumps(message, ensure_ascii=False, indent=2)
    return "\n".join(printable(line) for line in text.split("\n"))
