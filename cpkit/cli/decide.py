"""``cpkit approve`` and ``cpkit deny``: decide what an agent waits for."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from cpkit.cli.output import plain, print_json, write
from cpkit.cli.running import BadUse, Exit, run, say
from cpkit.cli.stores import Json, Store, opened, url_and
from cpkit.effects import EffectLedger
from cpkit.effects.records import APPROVAL
from cpkit.protocol import KeepsReceipts
from cpkit.records import CallRecord

__all__ = ["approve", "deny"]

Words = Annotated[
    list[str],
    typer.Argument(
        help="Where the store is, unless CPKIT_URL says it; the thread, and the key "
        "or the beginning of it, as cpkit pending shows them.",
        metavar="[URL] THREAD KEY",
        show_default=False,
    ),
]
By = Annotated[str | None, typer.Option(help="Who decides; kept with the decision.")]
Reason = Annotated[str | None, typer.Option(help="Why; the agent is told.")]
Args = Annotated[
    str | None,
    typer.Option(
        help="The arguments, as JSON, where one key is asked for with several.",
        metavar="JSON",
    ),
]


def approve(words: Words, by: By = None, args: Args = None, json: Json = False) -> None:
    """Approve an effect that an agent waits for.

    Exits with 0 when it is approved on record, also from before; with 1 where it was
    denied before, or nothing was asked.
    """
    _finish(run(_decide(words, True, by, None, args)), json)


def deny(
    words: Words,
    reason: Reason = None,
    by: By = None,
    args: Args = None,
    json: Json = False,
) -> None:
    """Deny an effect that an agent waits for.

    For good: it never runs. Exits with 0 when it is denied on record, also from
    before; with 1 where it was approved before, or nothing was asked.
    """
    _finish(run(_decide(words, False, by, reason, args)), json)


def _finish(outcome: dict[str, Any], json: bool) -> None:
    if json:
        print_json(outcome)
    elif outcome["ok"]:
        by = f" (by {outcome['by']})" if outcome["by"] else ""
        words = f"{outcome['decision']}{by}: {outcome['tool']} {outcome['key']}"
        write(plain(words) + "\n")
    else:
        say(outcome["error"])

    raise typer.Exit(Exit.DONE if outcome["ok"] else Exit.NO)


async def _decide(
    words: list[str],
    is_approved: bool,
    by: str | None,
    reason: str | None,
    args: str | None,
) -> dict[str, Any]:
    url, thread_id, start = url_and(words, "THREAD", "KEY")
    chosen = _parsed(args)

    async with opened(url, KeepsReceipts) as cp:
        ledger = EffectLedger(cp)
        asked = await _requests(cp, thread_id, start)
        keys = sorted({_key(one) for one in asked})

        if start in keys:
            keys = [start]

        if len(keys) > 1:
            raise BadUse(
                f"{len(keys)} requests of thread {thread_id!r} start with {start!r}; "
                "give more of the key"
            )

        if not keys:
            return _answer(
                None, f"nothing was asked in thread {thread_id!r} under {start!r}"
            )

        key = keys[0]

        try:
            if is_approved:
                ok = await ledger.approve(thread_id, key, by=by, args=chosen)
            else:
                ok = await ledger.deny(
                    thread_id, key, by=by, reason=reason, args=chosen
                )
        except ValueError as exc:
            raise BadUse(str(exc).replace("args=", "--args")) from exc

        # The record as it stands now says who decided, which need not be us.
        stands = [
            one
            for one in await _requests(cp, thread_id, key)
            if _key(one) == key and (chosen is None or one.call.args["args"] == chosen)
        ]

    return _answer(stands[-1] if stands else None, None if ok else "it is not so", ok)


def _answer(
    record: CallRecord | None, error: str | None, ok: bool = False
) -> dict[str, Any]:
    if record is None:
        return {"ok": False, "decision": None, "by": None, "key": None, "error": error}

    result: Mapping[str, Any] = record.result if isinstance(record.result, dict) else {}
    decision = {True: "approved", False: "denied"}.get(
        result.get("approved"),  # type: ignore[arg-type]  # None where undecided
        "undecided",
    )
    by = result.get("by")

    if not ok:
        who = f" by {by}" if by else ""
        error = (
            "nothing was asked with these arguments"
            if decision == "undecided"
            else f"it was {decision} before{who}, and that stands"
        )

    return {
        "ok": ok,
        "decision": decision,
        "by": by,
        "reason": result.get("reason"),
        "key": _key(record),
        "tool": record.call.args.get("tool"),
        "error": error,
    }


async def _requests(cp: Store, thread_id: str, start: str) -> list[CallRecord]:
    """Return the thread's requests, decided or not, whose key starts so."""
    return [
        one
        for one in await cp.list_calls(thread_id)
        if one.call.tool_name == APPROVAL
        and not one.erased
        and _key(one).startswith(start)
    ]


def _key(record: CallRecord) -> str:
    """Return the key of the effect that is asked for."""
    key = record.call.args.get("key")
    return key if isinstance(key, str) else ""


def _parsed(args: str | None) -> dict[str, Any] | None:
    if args is None:
        return None

    try:
        found = jsonlib.loads(args)
    except ValueError as exc:
        raise BadUse(f"--args is no JSON: {exc}") from exc

    if not isinstance(found, dict):
        raise BadUse("--args is a JSON object")

    return found
