"""``cpkit approve`` and ``cpkit deny``: decide an approval request of an agent."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated, Any

import typer

from cpkit.cli.output import counted, print_json, printable, write
from cpkit.cli.running import BadUse, Exit, print_stderr, run
from cpkit.cli.stores import Json, open_store, store_url
from cpkit.driver.ids import check_id
from cpkit.effects import ApprovalRequest, EffectLedger
from cpkit.effects.requests import request_of
from cpkit.lease import this_process
from cpkit.protocol import KeepsReceipts

__all__ = ["approve", "deny"]

Words = Annotated[
    list[str],
    typer.Argument(
        help="The store's URL, unless CPKIT_URL is set, and the key or the first "
        "characters of it, as cpkit pending shows it. With THREAD, only that thread's "
        "requests count.",
        metavar="[URL] [THREAD] KEY",
        show_default=False,
    ),
]
By = Annotated[
    str | None, typer.Option(help="Your name; it is stored with the decision.")
]
Reason = Annotated[
    str | None, typer.Option(help="Why you decide so; it is stored, and shown.")
]
Args = Annotated[
    str | None,
    typer.Option(
        help="The arguments as JSON, if the key has requests with different arguments.",
        metavar="JSON",
    ),
]

_PAGE = 200


def approve(
    words: Words,
    by: By = None,
    reason: Reason = None,
    args: Args = None,
    json: Json = False,
) -> None:
    """Approve an effect that an agent waits to run.

    Exits with 0 if the stored decision is an approval, also an earlier one. Exits with
    1 if the request was denied earlier, has expired, or does not exist.
    """
    _print_and_exit(run(_decide(words, True, by, reason, args)), json)


def deny(
    words: Words,
    reason: Reason = None,
    by: By = None,
    args: Args = None,
    json: Json = False,
) -> None:
    """Deny an effect that an agent waits to run.

    The effect then does not run. Exits with 0 if the stored decision is a denial, also
    an earlier one. Exits with 1 if the request was approved earlier, has expired, or
    does not exist.
    """
    _print_and_exit(run(_decide(words, False, by, reason, args)), json)


def _print_and_exit(outcome: dict[str, Any], json: bool) -> None:
    try:
        _print(outcome, json)
    except (OSError, typer.Exit):  # standard output is full, or its reader is gone
        if outcome["ok"]:
            print_stderr(f"{outcome['decision']}: the decision is stored")

        raise

    raise typer.Exit(Exit.DONE if outcome["ok"] else Exit.NO)


def _print(outcome: dict[str, Any], json: bool) -> None:
    if json:
        print_json(outcome)
    elif outcome["ok"]:
        by = f" (by {outcome['by']})" if outcome["by"] else ""
        line = f"{outcome['decision']}{by}: {outcome['tool']} {outcome['key']}"
        write(printable(line) + "\n")
    else:
        print_stderr(outcome["error"])


async def _decide(
    words: list[str],
    is_approved: bool,
    by: str | None,
    reason: str | None,
    args: str | None,
) -> dict[str, Any]:
    url, thread_id, start = _split(words)
    # An empty key, for instance of an unset variable, would fit every request.
    check_id("KEY", start)
    chosen = _parse_args(args)

    async with open_store(url, KeepsReceipts) as cp:
        ledger = EffectLedger(cp)
        keys = await _keys(ledger, cp, thread_id, start)

        if len(keys) > 1:
            where = "" if thread_id is None else f" of thread {thread_id!r}"
            raise BadUse(
                f"{len(keys)} requests{where} start with {start!r}; "
                "type more characters of the key"
            )

        if not keys:
            where = "the store" if thread_id is None else f"thread {thread_id!r}"
            return _no(f"{where} has no approval request under {start!r}")

        (key,) = keys
        verb = ledger.approve if is_approved else ledger.deny
        command = "cpkit approve" if is_approved else "cpkit deny"

        try:
            ok = await verb(
                key,
                by=by,
                reason=reason,
                origin=f"{command}, {this_process()}",
                args=chosen,
            )
        except ValueError as exc:
            raise BadUse(str(exc).replace("args=", "--args")) from exc

        return await _outcome(ledger, key, chosen, ok)


async def _keys(
    ledger: EffectLedger, cp: KeepsReceipts, thread_id: str | None, start: str
) -> list[str]:
    """Return the keys of requests that start so; the exact key alone if there is it."""
    if thread_id is None:
        found = [one.key for one in await all_requests(ledger)]

        # A decided request is found by its whole key only.
        if start not in found and await ledger.decision(start) is not None:
            found.append(start)
    else:
        requests = [request_of(one) for one in await cp.list_calls(thread_id)]
        found = [one.key for one in requests if one and not one.record.erased]

    keys = sorted({key for key in found if key.startswith(start)})
    return [start] if start in keys else keys


async def all_requests(ledger: EffectLedger) -> list[ApprovalRequest]:
    """Return every undecided request of the store, oldest first."""
    found = page = await ledger.requests(limit=_PAGE)

    while len(page) == _PAGE:
        page = await ledger.requests(after=page[-1].cursor, limit=_PAGE)
        found = found + page

    return found


async def _outcome(
    ledger: EffectLedger, key: str, args: dict[str, Any] | None, ok: bool
) -> dict[str, Any]:
    """Return the stored decision as the command's JSON document."""
    decision = await ledger.decision(key, args=args)

    if decision is None:
        return _no("there is no approval request with these arguments", key)

    earlier = f"the request was already {decision.verdict}"
    by = f" by {decision.by}" if decision.by else ""
    return {
        "ok": ok,
        "decision": decision.verdict,
        "by": decision.by,
        "at": None if decision.at is None else decision.at.isoformat(),
        "reason": decision.reason,
        "origin": decision.origin,
        "key": key,
        "thread_id": decision.request.thread_id,
        "tool": decision.request.tool,
        "error": None if ok else earlier + by,
    }


def _no(error: str, key: str | None = None) -> dict[str, Any]:
    return {"ok": False, "decision": None, "by": None, "key": key, "error": error}


def _split(words: list[str]) -> tuple[str, str | None, str]:
    """Split a command's words into the URL and the thread, both optional, and a key."""
    first_is_url = ":/" in words[0] or words[0].startswith(("file:", "memory:"))

    match words:
        case [key] if not first_is_url:
            return store_url(None), None, key
        case [url, key] if first_is_url:
            return url, None, key
        case [thread_id, key]:
            return store_url(None), thread_id, key
        case [url, thread_id, key]:
            return url, thread_id, key

    raise BadUse(
        f"expected [URL] [THREAD] KEY, got {counted(len(words), 'word')}"
        + ("; KEY is missing" if len(words) == 1 else "")
    )


def _parse_args(args: str | None) -> dict[str, Any] | None:
    if args is None:
        return None

    try:
        found = jsonlib.loads(args)
    except (ValueError, RecursionError) as exc:
        raise BadUse(f"--args is not JSON: {exc}") from exc

    if not isinstance(found, dict):
        raise BadUse(f"--args must be a JSON object, not {args[:40]!r}")

    return found
