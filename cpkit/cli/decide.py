"""``cpkit approve`` and ``cpkit deny``: decide an approval request of an agent."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from cpkit.cli.output import print_json, printable, write
from cpkit.cli.running import BadUse, Exit, print_stderr, run
from cpkit.cli.stores import Json, Store, open_store, split_words
from cpkit.effects import EffectLedger
from cpkit.effects.records import APPROVAL
from cpkit.protocol import KeepsReceipts
from cpkit.records import CallRecord

__all__ = ["approve", "deny"]

Words = Annotated[
    list[str],
    typer.Argument(
        help="The store's URL, unless CPKIT_URL is set; the thread, and the key or the "
        "first characters of it, as cpkit pending shows them.",
        metavar="[URL] THREAD KEY",
        show_default=False,
    ),
]
By = Annotated[
    str | None, typer.Option(help="Your name; it is stored with the decision.")
]
Reason = Annotated[
    str | None, typer.Option(help="Why you deny it; the agent receives this text.")
]
Args = Annotated[
    str | None,
    typer.Option(
        help="The arguments as JSON, if the key has requests with different arguments.",
        metavar="JSON",
    ),
]

_NO_SUCH_ARGS = "there is no approval request with these arguments"


def approve(words: Words, by: By = None, args: Args = None, json: Json = False) -> None:
    """Approve an effect that an agent waits to run.

    Exits with 0 if the stored decision is an approval, also an earlier one. Exits with
    1 if the request was denied earlier, or does not exist.
    """
    _print_and_exit(run(_decide(words, True, by, None, args)), json)


def deny(
    words: Words,
    reason: Reason = None,
    by: By = None,
    args: Args = None,
    json: Json = False,
) -> None:
    """Deny an effect that an agent waits to run.

    The effect then never runs. Exits with 0 if the stored decision is a denial, also
    an earlier one. Exits with 1 if the request was approved earlier, or does not exist.
    """
    _print_and_exit(run(_decide(words, False, by, reason, args)), json)


def _print_and_exit(outcome: dict[str, Any], json: bool) -> None:
    if json:
        print_json(outcome)
    elif outcome["ok"]:
        by = f" (by {outcome['by']})" if outcome["by"] else ""
        line = f"{outcome['decision']}{by}: {outcome['tool']} {outcome['key']}"
        write(printable(line) + "\n")
    else:
        print_stderr(outcome["error"])

    raise typer.Exit(Exit.DONE if outcome["ok"] else Exit.NO)


async def _decide(
    words: list[str],
    is_approved: bool,
    by: str | None,
    reason: str | None,
    args: str | None,
) -> dict[str, Any]:
    url, thread_id, start = split_words(words, "THREAD", "KEY")
    chosen = _parse_args(args)

    async with open_store(url, KeepsReceipts) as cp:
        ledger = EffectLedger(cp)
        requests = await _requests(cp, thread_id, start)
        keys = sorted({_key(one) for one in requests})

        if start in keys:
            keys = [start]

        if len(keys) > 1:
            raise BadUse(
                f"{len(keys)} requests of thread {thread_id!r} start with {start!r}; "
                "type more characters of the key"
            )

        if not keys:
            return _outcome(
                None, f"thread {thread_id!r} has no approval request under {start!r}"
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

        # Read the decision back: another person may have decided first.
        decided = [
            one
            for one in await _requests(cp, thread_id, key)
            if _key(one) == key and (chosen is None or one.call.args["args"] == chosen)
        ]

    return _outcome(decided[-1] if decided else None, None if ok else _NO_SUCH_ARGS, ok)


def _outcome(
    record: CallRecord | None, error: str | None, ok: bool = False
) -> dict[str, Any]:
    """Return the stored decision as the command's JSON document."""
    if record is None:
        return {"ok": False, "decision": None, "by": None, "key": None, "error": error}

    result: Mapping[str, Any] = record.result if isinstance(record.result, dict) else {}
    decision = {True: "approved", False: "denied"}.get(
        result.get("approved"),  # type: ignore[arg-type]  # None if undecided
        "undecided",
    )
    by = result.get("by")

    if not ok:
        earlier = f"the request was already {decision}" + (f" by {by}" if by else "")
        error = _NO_SUCH_ARGS if decision == "undecided" else earlier

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
    """Return the thread's requests with this start of a key, decided ones too."""
    return [
        one
        for one in await cp.list_calls(thread_id)
        if one.call.tool_name == APPROVAL
        and not one.erased
        and _key(one).startswith(start)
    ]


def _key(record: CallRecord) -> str:
    """Return the key of the effect that the request is about."""
    key = record.call.args.get("key")
    return key if isinstance(key, str) else ""


def _parse_args(args: str | None) -> dict[str, Any] | None:
    if args is None:
        return None

    try:
        found = jsonlib.loads(args)
    except ValueError as exc:
        raise BadUse(f"--args is not JSON: {exc}") from exc

    if not isinstance(found, dict):
        raise BadUse(f"--args must be a JSON object, not {args[:40]!r}")

    return found
