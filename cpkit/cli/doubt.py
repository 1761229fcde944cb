"""``cpkit landed``, ``not-landed`` and ``reopen``: say how an effect ended."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import typer

from cpkit.cli.decide import (
    By,
    Reason,
    Words,
    calls_waiting,
    one_key,
    parse_json,
    split_key,
)
from cpkit.cli.output import print_json, printable, write
from cpkit.cli.running import Exit as ExitCode
from cpkit.cli.running import NotFound, fail, run
from cpkit.cli.stores import Json, Store, open_store
from cpkit.effects import EffectLedger
from cpkit.effects.records import failure_of
from cpkit.lease import this_process
from cpkit.protocol import KeepsReceipts, ListsThreads

__all__ = ["landed", "not_landed", "reopen"]

Result = Annotated[
    str | None, typer.Option(help="The effect's result, as JSON.", metavar="JSON")
]

Act = Callable[[EffectLedger, str, dict[str, Any]], Awaitable[object]]


def landed(
    words: Words,
    result: Result = None,
    by: By = None,
    reason: Reason = None,
    json: Json = False,
) -> None:
    """Say that an effect in doubt happened.

    It is a call without an outcome whose run died. Waits until the call has shown no
    sign of life for some time. Exits with 1 if a run is executing it.
    """
    value = None if result is None else parse_json("--result", result)

    async def act(ledger: EffectLedger, key: str, said: dict[str, Any]) -> None:
        await ledger.landed(key, value, **said)

    _run("landed", words, by, reason, json, _in_doubt, act)


def not_landed(
    words: Words, by: By = None, reason: Reason = None, json: Json = False
) -> None:
    """Say that an effect in doubt did not happen.

    The next run of its thread runs the effect again. Waits until the call has shown no
    sign of life for some time. Exits with 1 if a run is executing it.
    """

    async def act(ledger: EffectLedger, key: str, said: dict[str, Any]) -> None:
        await ledger.not_landed(key, **said)

    _run("not-landed", words, by, reason, json, _in_doubt, act)


def reopen(
    words: Words, by: By = None, reason: Reason = None, json: Json = False
) -> None:
    """Let an effect run again that failed for good.

    A person knows that it changed nothing. The next run of the effect is a new attempt.
    cpkit calls shows the key. Without THREAD, the whole key is needed.
    """

    async def act(ledger: EffectLedger, key: str, said: dict[str, Any]) -> None:
        await ledger.reopen(key, **said)

    _run("reopen", words, by, reason, json, _failed, act)


def _run(
    command: str,
    words: list[str],
    by: str | None,
    reason: str | None,
    json: bool,
    find: Callable[[Store, str | None, str], Awaitable[str | None]],
    act: Act,
) -> None:
    logging.basicConfig(format="%(message)s")  # also says how long this watches

    async def work() -> dict[str, Any]:
        url, thread_id, start = split_key(words)
        origin = f"cpkit {command}, {this_process()}"

        async with open_store(url, ListsThreads, KeepsReceipts) as cp:
            key = await find(cp, thread_id, start)

            if key is None:
                raise NotFound(
                    f"cpkit {command} applies to no call under {start!r}; "
                    "cpkit calls shows the keys"
                )

            said = {"by": by, "reason": reason, "origin": origin}

            try:
                await act(EffectLedger(cp), key, said)
            except ValueError as exc:
                fail(ExitCode.NO, str(exc))

        return {"ok": True, "said": command, "key": key, "by": by, "reason": reason}

    outcome = run(work())

    if json:
        print_json(outcome)
    else:
        write(printable(f"{command}: {outcome['key']}") + "\n")


async def _in_doubt(cp: Store, thread_id: str | None, start: str) -> str | None:
    where = "" if thread_id is None else f" of thread {thread_id!r}"
    found = await calls_waiting(cp, thread_id)
    return one_key([one.key for one in found], start, where)


async def _failed(cp: Store, thread_id: str | None, start: str) -> str | None:
    if thread_id is None:
        return start if await cp.find_call(start) is not None else None

    failed = [
        one.call.idempotency_key
        for one in await cp.list_calls(thread_id)
        if failure_of(one) is not None
    ]
    return one_key(failed, start, f" of thread {thread_id!r}")
