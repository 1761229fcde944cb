"""``cpkit calls``: list the calls of a thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from cpkit.cli.output import one_line, print_json, print_table
from cpkit.cli.running import run
from cpkit.cli.stores import Json, no_thread, open_store, split_words
from cpkit.effects.records import effect_of, state_of
from cpkit.protocol import KeepsReceipts
from cpkit.records import CallRecord
from cpkit.tools.copying.exports import call_as_json
from cpkit.tools.formats import age, utc_time

__all__ = ["call_rows", "calls", "short_key", "shown_args"]

Words = Annotated[
    list[str],
    typer.Argument(
        help="The store's URL, unless CPKIT_URL is set, and the thread's id.",
        metavar="[URL] THREAD",
        show_default=False,
    ),
]
Full = Annotated[
    bool, typer.Option("--full", help="Do not shorten keys, args and results.")
]

# Characters of args and results that a table shows.
_SHORT = 80
_WHOLE = 1_000_000_000


def calls(words: Words, full: Full = False, json: Json = False) -> None:
    """List every call of a thread in the order of claims.

    The list includes released attempts, and erased calls of a deleted thread.
    """
    thread_id, found = run(_list(words))

    if json:
        print_json(
            {"thread_id": thread_id, "calls": [call_as_json(one) for one in found]}
        )
        return

    print_table(*call_rows(found, full=full))


def call_rows(
    found: Sequence[CallRecord], *, full: bool = False
) -> tuple[list[str], list[tuple[object, ...]]]:
    """Return the columns and the rows of a table of calls."""
    columns = ["key", "tool", "status", "try", "ago", "args", "result"]
    rows: list[tuple[object, ...]] = []

    for one in found:
        call = one.call
        width = _WHOLE if full else _SHORT
        rows.append(
            (
                call.idempotency_key if full else short_key(call.idempotency_key),
                call.tool_name,
                state_of(one) + (", erased" if one.erased else ""),
                one.attempt,
                age(one.issued_at),
                one_line(shown_args(one), width),
                "" if one.resolved_at is None else one_line(_shown_result(one), width),
                *((call.call_id, utc_time(one.issued_at)) if full else ()),
            )
        )

    return columns + (["call", "issued (UTC)"] if full else []), rows


def shown_args(record: CallRecord) -> dict[str, Any]:
    """Return the arguments; of an effect, without what the ledger keeps beside them."""
    effect = effect_of(record)
    return dict(record.call.args if effect is None else effect.args)


def _shown_result(record: CallRecord) -> Any:
    is_value = isinstance(record.result, dict) and set(record.result) == {"value"}
    return record.result["value"] if is_value and effect_of(record) else record.result


def short_key(key: str) -> str:
    """Shorten a hash to a prefix that the commands accept; keep any other key."""
    is_hash = len(key) == 64 and not set(key) - set("0123456789abcdef")
    return key[:12] if is_hash else key


async def _list(words: list[str]) -> tuple[str, list[CallRecord]]:
    url, thread_id = split_words(words, "THREAD")

    async with open_store(url, KeepsReceipts) as cp:
        found = await cp.list_calls(thread_id)

        if not found and await cp.load(thread_id) is None:
            raise no_thread(url, thread_id)

    return thread_id, found
