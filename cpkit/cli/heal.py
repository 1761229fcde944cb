"""``cpkit heal``: close the tool calls that a crash left without a result."""

from __future__ import annotations

from typing import Annotated

import typer

from cpkit.cli.output import print_json, printable, write
from cpkit.cli.running import BadUse, Exit, run
from cpkit.cli.stores import Json, no_thread, open_store, split_words
from cpkit.heal import HealReport
from cpkit.heal import heal as heal_thread
from cpkit.protocol import KeepsReceipts

__all__ = ["heal"]

Words = Annotated[
    list[str],
    typer.Argument(
        help="The store's URL, unless CPKIT_URL is set, and the thread's id.",
        metavar="[URL] THREAD",
        show_default=False,
    ),
]
CallsThread = Annotated[
    str | None,
    typer.Option(
        help="The thread with the ledger's calls.",
        metavar="THREAD",
        show_default="the thread itself",
    ),
]


def heal(words: Words, calls_thread: CallsThread = None, json: Json = False) -> None:
    """Append a result for each tool call of a thread that has none.

    Providers refuse a conversation with such a call. A call gets the result that the
    ledger recorded, or else a result that says that it was interrupted. Nothing is
    executed. Do not use it while an agent runs the thread.
    Exits with 1 if a call is left without a result.
    """
    report = run(_heal(words, calls_thread))

    if json:
        print_json(
            {
                "thread_id": report.thread_id,
                "closed": [
                    {"call_id": one.call_id, "tool": one.tool_name, "from": one.source}
                    for one in report.closed
                ],
                "left": [
                    {"call_id": one.call_id, "tool": one.tool_name, "why": one.reason}
                    for one in report.left
                ],
            }
        )
    else:
        write("".join(f"{printable(line)}\n" for line in str(report).splitlines()))

    if not report:
        raise typer.Exit(Exit.NO)


async def _heal(words: list[str], calls_thread: str | None) -> HealReport:
    url, thread_id = split_words(words, "THREAD")

    async with open_store(url, KeepsReceipts) as cp:
        if await cp.load(thread_id) is None:
            raise no_thread(url, thread_id)

        try:
            return await heal_thread(cp, thread_id, calls_thread=calls_thread)
        except (TypeError, ValueError) as exc:
            raise BadUse(str(exc)) from exc
