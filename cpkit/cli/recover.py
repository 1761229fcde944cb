"""``cpkit recover``: recover a thread after a crash of its run."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import ModuleType
from typing import Annotated, Any

import typer

from cpkit.cli.loading import load
from cpkit.cli.output import print_json, printable, write
from cpkit.cli.running import BadUse, Exit, NotFound, run
from cpkit.cli.stores import (
    Json,
    Store,
    no_thread,
    open_store,
    split_words,
    supports,
)
from cpkit.effects import EffectLedger, RecoverReport, Tool, ToolRegistry
from cpkit.errors import CorruptThread
from cpkit.heal import heal as heal_thread
from cpkit.lease import LeaseTimeout
from cpkit.protocol import KeepsReceipts

__all__ = ["recover"]

Words = Annotated[
    list[str],
    typer.Argument(
        help="The store's URL, unless CPKIT_URL is set; the thread; and its tools: a "
        "list of tools, a ToolRegistry, or a module with tools.",
        metavar="[URL] THREAD MODULE:TOOLS",
        show_default=False,
    ),
]
Timeout = Annotated[
    float, typer.Option(help="Seconds to wait for a process that runs the thread.")
]


Heal = Annotated[
    bool,
    typer.Option(
        "--heal", help="Then append a result for each tool call that has none."
    ),
]


def recover(
    words: Words, timeout: Timeout = 30.0, heal: Heal = False, json: Json = False
) -> None:
    """Recover a thread after a crash.

    Asks the verify hooks of the tools, and runs released calls again. Takes the
    thread's lease. Exits with 1 if a call is left for a person, or if another process
    runs the thread.
    """
    url, thread_id, target = split_words(words, "THREAD", "MODULE:TOOLS")
    tools = _tools(target)
    logging.basicConfig(format="%(message)s")  # also says for whom it waits

    async def work() -> RecoverReport:
        async with open_store(url) as cp:
            if not await _has(cp, thread_id):
                raise no_thread(url, thread_id)

            try:
                ledger = EffectLedger(cp, timeout=timeout)
            except ValueError as exc:
                raise BadUse(f"--timeout: {exc}") from exc

            try:
                return await ledger.recover(
                    thread_id, tools, heal=heal_thread if heal else None
                )
            except LeaseTimeout as exc:
                raise NotFound(str(exc)) from exc

    report = run(work())

    if json:
        print_json(_as_json(report))
    else:
        write("".join(f"{printable(line)}\n" for line in str(report).splitlines()))

    raise typer.Exit(Exit.NO if report.surfaced else Exit.DONE)


async def _has(cp: Store, thread_id: str) -> bool:
    """Return whether the store has the thread, or calls of a deleted one."""
    try:
        if supports(cp, KeepsReceipts) and await cp.list_calls(thread_id):
            return True

        return await cp.load(thread_id) is not None
    except CorruptThread:
        return True


def _tools(target: str) -> list[Tool]:
    found = load(target)

    if isinstance(found, ModuleType):
        found = [one for one in vars(found).values() if isinstance(one, Tool)]

    if not isinstance(found, (ToolRegistry, Iterable)):
        raise BadUse(f"{target!r} is {found!r:.60}, not a list of tools")

    tools = list(found)

    if not all(isinstance(one, Tool) for one in tools):
        raise BadUse(f"{target!r} has entries that are not tools; make them with @tool")

    if len({one.name for one in tools}) < len({*tools}):
        raise BadUse(f"{target!r} has two tools with the same name")

    return tools


def _as_json(report: RecoverReport) -> dict[str, Any]:
    return {
        "thread_id": report.thread_id,
        "healed": None if report.healed is None else str(report.healed),
        "calls": [
            {
                "action": one.action,
                "tool": one.record.call.tool_name,
                "key": one.record.call.idempotency_key,
                "attempt": one.record.attempt,
                "reason": one.reason,
            }
            for one in report.calls
        ],
        "ran": [
            {
                "tool": one.record.call.tool_name,
                "key": one.record.call.idempotency_key,
                "is_error": outcome.is_error,
                "content": outcome.content,
            }
            for one, outcome in report.outcomes
        ],
    }
