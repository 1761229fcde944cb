"""``cpkit watch``: print a thread's messages as they are appended, like ``tail -f``."""

from __future__ import annotations

from contextlib import aclosing
from typing import Annotated

import typer

from cpkit.cli.output import print_json, printable, write
from cpkit.cli.running import print_stderr, run
from cpkit.cli.show import Words, in_short
from cpkit.cli.stores import open_store, split_words
from cpkit.sessions.tail import read_from

__all__ = ["watch"]

Last = Annotated[
    int, typer.Option(help="How many of the last messages to print first.", min=0)
]
After = Annotated[
    int | None,
    typer.Option("--after", help="Print all messages after this version first.", min=0),
]
Lines = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]


def watch(
    words: Words, last: Last = 10, after: After = None, json: Lines = False
) -> None:
    """Print a thread's messages as they are appended, until Ctrl-C."""
    run(_follow(words, last, after, json))


async def _follow(words: list[str], last: int, after: int | None, json: bool) -> None:
    url, thread_id = split_words(words, "THREAD")

    async with open_store(url) as cp:
        if after is None:
            version = await cp.append(thread_id, [])
            after = max(0, version - last)

            if not version:
                print_stderr(f"waiting for messages of thread {thread_id!r}")

        events = read_from(cp, thread_id, after)

        async with aclosing(events):
            async for version, message in events:
                if json:
                    line = {"version": version, "message": message}
                    print_json(line, on_one_line=True)
                else:
                    role, text = in_short(message)
                    write(printable(f"{version}  {role}  {text}") + "\n")
