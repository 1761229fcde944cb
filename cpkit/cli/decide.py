"""``cpkit approve``, ``deny`` and ``withdraw``: decide an approval request."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from cpkit.cli.output import print_json, printable, write
from cpkit.cli.pending import Waiting, all_pending, all_requests, pending_in
from cpkit.cli.running import BadUse, Exit, print_stderr, run
from cpkit.cli.stores import Json, Store, open_store, store_url
from cpkit.driver.ids import check_id
from cpkit.effects import EffectLedger
from cpkit.effects.effect import request_key
from cpkit.effects.requests import request_of
from cpkit.lease import this_process
from cpkit.protocol import KeepsReceipts, ListsThreads
from cpkit.tools.formats import counted

__all__ = [
    "By",
    "Reason",
    "Words",
    "approve",
    "deny",
    "one_key",
    "parse_json",
    "split_key",
    "withdraw",
]

Words = Annotated[
    list[str],
    typer.Argument(
        help="The store's URL, unless CPKIT_URL is set, and the key or the first "
        "characters of it, as cpkit pending shows it. With THREAD, only that thread "
        "counts.",
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
Value = Annotated[
    str | None,
    typer.Option(
        help="A value for the effect, as JSON, for instance '{\"limit\": 200}'. Where "
        "the agent's policy lets people change arguments, those that it names.",
        metavar="JSON",
    ),
]


def approve(
    words: Words,
    by: By = None,
    reason: Reason = None,
    args: Args = None,
    value: Value = None,
    json: Json = False,
) -> None:
    """Approve an effect that an agent waits to run.

    Exits with 0 if the stored decision is an approval, also an earlier one. Exits with
    1 if the request was denied earlier, has expired, or does not exist.
    """
    chosen = {} if value is None else {"value": parse_json("--value", value)}
    _print_and_exit(run(_decide("approve", words, by, reason, args, chosen)), json)


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
    _print_and_exit(run(_decide("deny", words, by, reason, args, {})), json)


def withdraw(
    words: Words,
    reason: Reason = None,
    by: By = None,
    args: Args = None,
    json: Json = False,
) -> None:
    """End an approval request without a decision.

    For instance after a user cancelled. The run that waits ends, and no worker runs its
    thread. A later run of the effect asks again. Exits with 1 if the request was
    decided earlier, or does not exist.
    """
    _print_and_exit(run(_decide("withdraw", words, by, reason, args, {})), json)


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
    verb: str,
    words: list[str],
    by: str | None,
    reason: str | None,
    args: str | None,
    chosen: dict[str, Any],
) -> dict[str, Any]:
    url, thread_id, start = split_key(words)
    selected = None if args is None else parse_json("--args", args)

    if selected is not None and not isinstance(selected, dict):
        raise BadUse(f"--args must be a JSON object, not {args!r:.42}")

    async with open_store(url, ListsThreads, KeepsReceipts) as cp:
        ledger = EffectLedger(cp)
        key = await _request_key(ledger, cp, thread_id, start)

        if key is None:
            where = "the store" if thread_id is None else f"thread {thread_id!r}"
            return _no(f"{where} has no approval request under {start!r}")

        try:
            ok = await getattr(ledger, verb)(
                key,
                by=by,
                reason=reason,
                origin=f"cpkit {verb}, {this_process()}",
                args=selected,
                **chosen,
            )
            request = await ledger.request(key, args=selected)
        except ValueError as exc:
            raise BadUse(str(exc).replace("args=", "--args")) from exc

    if request is None:
        return _no("there is no approval request with these arguments", key)

    made = request.decision
    verdict = made and made.verdict
    earlier = f"the request was already {verdict}"
    said = f" by {made.by}" if made is not None and made.by else ""
    return {
        "ok": ok,
        "decision": verdict,
        "by": by if made is None else made.by,
        "at": None if made is None or made.at is None else made.at.isoformat(),
        "reason": reason if made is None else made.reason,
        "origin": None if made is None else made.origin,
        "value": None if made is None else made.value,
        "key": key,
        "thread_id": request.thread_id,
        "tool": request.tool,
        "error": None if ok else earlier + said,
    }


async def _request_key(
    ledger: EffectLedger, cp: Store, thread_id: str | None, start: str
) -> str | None:
    """Return the key of the request that is meant, or ``None``."""
    if thread_id is not None:
        requests = [request_of(one) for one in await cp.list_calls(thread_id)]
        found = [one.key for one in requests if one and not one.record.erased]
        return one_key(found, start, f" of thread {thread_id!r}")

    if len(start) == 64 and await cp.find_call(request_key(start, 1)):
        return start

    listed = one_key([one.key for one in await ledger.requests()], start, "")

    if listed is not None:
        return listed

    # A request that was decided, or restored or copied with its thread, is on no list.
    return one_key([one.key for one in await all_requests(cp)], start, "")


def one_key(found: Iterable[str], start: str, where: str) -> str | None:
    """Return the one key that starts so, or is exactly this; ``None`` without any."""
    keys = sorted({key for key in found if key.startswith(start)})

    if start in keys or not keys:
        return start if keys else None

    if len(keys) > 1:
        raise BadUse(
            f"{len(keys)} requests{where} start with {start!r}; "
            "type more characters of the key"
        )

    return keys[0]


async def calls_waiting(cp: Store, thread_id: str | None) -> list[Waiting]:
    """Return the calls without an outcome, of one thread or of all."""
    if thread_id is not None:
        found = await pending_in(cp, thread_id)
    else:
        found, _ = await all_pending(cp)

    return [one for one in found if one.request is None]


def _no(error: str, key: str | None = None) -> dict[str, Any]:
    return {"ok": False, "decision": None, "by": None, "key": key, "error": error}


def split_key(words: list[str]) -> tuple[str, str | None, str]:
    """Split a command's words into the URL and the thread, both optional, and a key."""
    first_is_url = ":/" in words[0] or words[0].startswith(("file:", "memory:"))
    thread_id: str | None = None

    match words:
        case [key] if not first_is_url:
            url = store_url(None)
        case [url, key] if first_is_url:
            pass
        case [thread_id, key]:
            url = store_url(None)
        case [url, thread_id, key]:
            pass
        case _:
            raise BadUse(
                f"expected [URL] [THREAD] KEY, got {counted(len(words), 'word')}"
                + ("; KEY is missing" if len(words) == 1 else "")
            )

    # An empty key, for instance of an unset variable, would fit every request.
    check_id("KEY", key)
    return url, thread_id, key


def parse_json(option: str, text: str) -> Any:
    """Parse the JSON of an option."""
    try:
        return jsonlib.loads(text)
    except (ValueError, RecursionError) as exc:
        raise BadUse(f"{option} is not JSON: {exc}") from exc
