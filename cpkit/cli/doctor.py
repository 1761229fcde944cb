"""``cpkit doctor``: check that a store works, and advise what to change."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from heapq import nlargest
from importlib.metadata import entry_points
from typing import Annotated, Any
from uuid import uuid4

import typer

import cpkit
from cpkit.cli.output import print_json, printable, progress, stdout
from cpkit.cli.pending import Waiting, is_for_people, waiting_of
from cpkit.cli.running import Exit, run
from cpkit.cli.stores import (
    Json,
    Store,
    Url,
    command_line,
    display_url,
    open_store,
    store_url,
    supports,
)
from cpkit.driver import Limits, StoreInfo
from cpkit.driver.examine import examine
from cpkit.driver.sealed import SealedStore
from cpkit.driver.store import MAX_APPEND, MAX_PAYLOAD
from cpkit.errors import BackendUnavailable, CorruptThread, KeyMissing
from cpkit.fenced import read_part
from cpkit.protocol import (
    ErasesThreads,
    KeepsReceipts,
    ListsThreads,
    ReadsRanges,
    StatesDurability,
)
from cpkit.records import Durability, Survives, ThreadInfo, ToolCall
from cpkit.registry import GROUP, examine_store, inspect_store
from cpkit.tools.formats import age, counted, size
from cpkit.tools.paging import thread_pages
from cpkit.tools.space import Weight, weigh

__all__ = ["doctor"]

ReadOnly = Annotated[
    bool, typer.Option("--read-only", help="Do not write the probe thread.")
]
Create = Annotated[
    bool, typer.Option("--create", help="Create the store if it does not exist.")
]

Check = Annotated[
    bool, typer.Option("--check", help="Read all, with the engine's own check.")
]

# Below so many bytes or files, doctor says that the place is nearly full.
_LOW_BYTES, _LOW_FILES = 100 * 2**20, 1000
# The number of threads to examine, so that the check of a large store stays short.
_BOUND = 2000
_OVERDUE = timedelta(days=1)
_NAMED = 3
# Messages above which advice says how to cut a thread.
_LONG = 10_000
# Bytes above which advice says how to make a thread smaller.
_LARGE = 10 * 2**20


def doctor(
    url: Url = None,
    read_only: ReadOnly = False,
    create: Create = False,
    check: Check = False,
    json: Json = False,
) -> None:
    """Check that a store works; print what it promises, and advice.

    Writes a probe thread (cpkit:doctor:…), reads it back and deletes it together with
    its keys; --read-only skips that. Exits with 1 if the probe fails, if the calls of a
    thread are damaged or need a key that the keyring lacks, or if a write survives less
    than by the store's default.
    """
    place = store_url(url)
    report = run(_examine(place, read_only, create, check))

    if json:
        print_json(report)
    else:
        _print(report)

    is_well = report["probe"]["ok"] and not (report["damaged"] or report["is_weak"])
    raise typer.Exit(Exit.DONE if is_well else Exit.NO)


async def _examine(
    url: str, read_only: bool, create: bool, check: bool
) -> dict[str, Any]:
    async with open_store(url, create=create, volatile=True) as cp:
        found = await inspect_store(url)
        more = await examine_store(url, whole=check)
        durability = cp.durability if supports(cp, StatesDurability) else None
        # A driver of another package may have no default.
        default = getattr(getattr(cp, "store", None), "survives_by_default", None)
        limits: Limits | None = getattr(cp, "limits", None)
        can_list = supports(cp, ListsThreads, KeepsReceipts)
        bound = None if check else _BOUND
        missing: dict[str, str] = {}  # keys of the ring, by thread
        counted, oldest, damaged, longest, largest = (
            await _survey(cp, bound, missing) if can_list else (None, None, [], [], [])
        )

        if check and counted is not None:
            damaged += await _lost_keys(cp)

        sealed = await _sealed(cp, bound, missing) if can_list else {}
        probe = (
            {"ok": True, "words": "skipped: --read-only"}
            if read_only
            else await _answered(_probe(cp))
        )
        report = {
            "url": display_url(url),
            "cpkit": cpkit.__version__,
            "python": platform.python_version(),
            "driver": _driver(url),
            "schema_version": None if found is None else found.version,
            "bytes": None if found is None else found.size,
            "survives": None if durability is None else str(durability.survives),
            "survives_by_default": None if default is None else str(default),
            "is_weak": _is_weak(durability, default),
            "settings": None if durability is None else dict(durability.settings),
            "max_payload": None if limits is None else limits.max_value,
            "max_append": None if limits is None else limits.max_append,
            "threads": counted,
            "threads_bound": bound,
            "longest_threads": longest,
            "largest_threads": largest,
            "oldest_pending": None if oldest is None else _as_json(oldest),
            "facts": {
                **({} if found is None else found.dead),
                **more.facts,
                **_space(found and found.path),
                **sealed,
            },
            "damaged": [*damaged, *missing.values(), *more.damaged],
            "probe": probe,
        }

    advice = () if durability is None else durability.advice
    report["advice"] = [*advice, *more.advice, *_advice(url, report, found, oldest)]
    return report


def _is_weak(durability: Durability | None, default: Survives | None) -> bool:
    """Tell whether a write survives less than it does by the store's default."""
    levels = [*Survives]
    return (
        durability is not None
        and default is not None
        and levels.index(durability.survives) < levels.index(default)
    )


def _driver(url: str) -> str:
    """Return the class that the URL's scheme names."""
    scheme = url.partition(":")[0].lower()
    return next(entry.value for entry in entry_points(group=GROUP, name=scheme))


async def _survey(
    cp: Store, bound: int | None, missing: dict[str, str]
) -> tuple[
    int | None, Waiting | None, list[str], list[dict[str, Any]], list[dict[str, Any]]
]:
    """Examine so many threads, or all.

    Returns their number (``None`` if damage ends the list), the oldest pending call
    that a person has to know of, the damage that was found, and the longest and the
    largest threads.
    """
    count = 0
    is_complete = True
    people: list[Waiting] = []
    damaged: list[str] = []
    longest: list[ThreadInfo] = []
    largest: list[Weight] = []
    can_weigh = supports(cp, ReadsRanges)

    with progress("threads") as advance:
        try:
            async for page in thread_pages(cp, limit=bound, internal=False):
                for info in page:
                    try:
                        calls = await cp.list_calls(info.thread_id)
                        people += filter(is_for_people, waiting_of(calls))
                    except CorruptThread as exc:
                        damaged.append(str(exc))
                        continue
                    except KeyMissing as exc:
                        missing[info.thread_id] = str(exc)
                        continue

                    if can_weigh:
                        # `--check` and `export` tell
                        with suppress(CorruptThread, KeyMissing):
                            largest.append(await weigh(cp, info.thread_id, calls))
                            largest = nlargest(_NAMED, largest, key=_total)

                longest = nlargest(_NAMED, [*longest, *page], key=_version)
                count += len(page)
                advance(len(page))
        except CorruptThread as exc:  # a thread whose id cannot be read
            damaged.append(str(exc))
            is_complete = False

    oldest = min(people, key=lambda one: one.record.issued_at, default=None)
    lengths = [await _length(cp, info) for info in longest]
    lengths.sort(key=lambda one: -int(one["messages"]))
    sizes = [_as_sizes(one) for one in largest]
    return count if is_complete else None, oldest, damaged, lengths, sizes


def _total(weight: Weight) -> int:
    return weight.total


def _as_sizes(weight: Weight) -> dict[str, Any]:
    return {**asdict(weight), "bytes": weight.total, "words": str(weight)}


def _version(info: ThreadInfo) -> int:
    return info.version


async def _length(cp: Store, info: ThreadInfo) -> dict[str, Any]:
    """Return how many messages a thread has: fewer than its version if trimmed."""
    first = 0

    if supports(cp, ReadsRanges):
        with suppress(CorruptThread, KeyMissing):  # which the survey has told
            first, _ = await read_part(cp, info.thread_id, 0, 0)

    return {"thread_id": info.thread_id, "messages": info.version - first}


async def _sealed(
    cp: Store, bound: int | None, missing: dict[str, str]
) -> dict[str, str]:
    """Count the threads that are encrypted, in a store that has a keyring.

    Of so many threads it looks at the newest message, extra and calls; of all, at all.
    Adds to ``missing`` where the ring lacks a key.
    """
    if not isinstance(getattr(cp, "store", None), SealedStore):
        return {}

    plain = count = 0

    async for page in thread_pages(cp, limit=bound):
        for info in page:
            start = 0 if bound is None else -1

            with suppress(CorruptThread):  # which the survey has told
                seals = await examine(cp, info.thread_id, start)
                plain += bool(seals.plain)

                for fault in seals.faults:
                    if isinstance(fault, KeyMissing):
                        missing.setdefault(info.thread_id, str(fault))

        count += len(page)

    threads = counted(count, "thread")
    seen = (
        "all values were looked at"
        if bound is None
        else "of each the newest message, extra and calls; --check looks at all"
    )
    return {"encrypted": f"{threads}, {plain} with values from before ({seen})"}


async def _lost_keys(cp: Store) -> list[str]:
    """Return the calls whose keys could be claimed again, although they hold them."""
    lost = []

    async for page in thread_pages(cp, erased=True):
        for info in page:
            with suppress(CorruptThread, KeyMissing):  # which the survey has told
                for record in await cp.list_calls(info.thread_id):
                    key = record.call.idempotency_key

                    if record.status == "failed" or await cp.find_call(key) == record:
                        continue

                    # Not one that was resolved or forgotten meanwhile.
                    if record in await cp.list_calls(info.thread_id):
                        lost.append(
                            f"call {record.call.call_id!r} of thread "
                            f"{info.thread_id!r} has lost its key {key!r}, which could "
                            "be claimed again"
                        )

    return lost


async def _answered(probe: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Return the outcome of the probe, also of a store that takes no writes."""
    try:
        return await probe
    except BackendUnavailable as exc:
        if not exc.rejected:
            raise

        return {"ok": False, "words": str(exc)}


async def _probe(cp: Store) -> dict[str, Any]:
    """Write a thread, read it back and delete it; measure an append."""
    thread_id = f"cpkit:doctor:{uuid4().hex}"
    call = ToolCall("probe", "cpkit:doctor", {"probe": True}, thread_id)
    problems = []
    can_delete = supports(cp, ErasesThreads)

    try:
        began = time.perf_counter()
        await cp.append(thread_id, [{"probe": 1}], expected_version=0)
        took = time.perf_counter() - began
        await cp.save_extra(thread_id, {"probe": None})

        if await cp.record_issued(thread_id, call) is not None:
            problems.append("a call already holds a key that was never used")

        await cp.record_result(thread_id, call.call_id, {"probe": "done"})
        data = await cp.load(thread_id)
        completed = await cp.find_completed(thread_id)

        if (
            data is None
            or data.messages != [{"probe": 1}]
            or data.extra != {"probe": None}
        ):
            problems.append("load returned something other than what was written")

        if completed is None or completed.result != {"probe": "done"}:
            problems.append("find_completed did not find a completed call")
    finally:
        if can_delete:
            await cp.delete_thread(thread_id, forget_keys=True)

    left = " and deleted"

    if not can_delete:
        left = f"; {thread_id} stays, because this store cannot delete threads"
    elif await cp.load(thread_id) is not None:
        problems.append(f"thread {thread_id} still exists after its deletion")

    words = "; ".join(problems) or (
        f"a thread was written, read{left}; an append took {took * 1000:.1f} ms"
    )
    return {"ok": not problems, "words": words}


def _advice(
    url: str, report: dict[str, Any], found: StoreInfo | None, oldest: Waiting | None
) -> list[str]:
    advice: list[str] = []
    path = None if found is None else found.path

    if path is not None and os.stat(path).st_mode & 0o077:
        advice.append(f"other users can read {path}: chmod -R go-rwx '{path}'")

    if path is not None and hasattr(os, "statvfs") and _is_nearly_full(path):
        [left] = _space(path).values()
        advice.append(f"{path} has {left} left: a full disk refuses every write")

    if oldest is not None and datetime.now(UTC) - oldest.record.issued_at > _OVERDUE:
        what = "call" if oldest.request is None else "approval"
        advice.append(
            f"a {what} has waited for {age(oldest.record.issued_at)}: "
            + command_line("pending", url)
        )

    named = [
        one["thread_id"]
        for one in report["longest_threads"]
        if one["messages"] >= _LONG
    ]

    for one in report["longest_threads"]:
        if one["thread_id"] in named:
            cut = command_line("prune", url, "--prefix", one["thread_id"])
            advice.append(
                f"thread {one['thread_id']!r} has {one['messages']} messages, which "
                "each load reads; to cut it, and those whose ids begin with its id: "
                f"{cut} --keep-last 1000 --dry-run"
            )

    for one in report["largest_threads"]:
        if one["bytes"] >= _LARGE and one["calls"] >= one["messages"]:
            cut = command_line("prune", url, "--prefix", one["thread_id"])
            advice.append(
                f"thread {one['thread_id']!r} has about {size(one['calls'])} of args "
                "and results; to erase those of old calls, there and in threads whose "
                f"ids begin with its id: {cut} --calls-older-than 30d --dry-run"
            )
        elif one["bytes"] >= _LARGE and one["thread_id"] not in named:
            cut = command_line("prune", url, "--prefix", one["thread_id"])
            advice.append(
                f"thread {one['thread_id']!r} has about {size(one['messages'])} of "
                "messages; to cut it, and those whose ids begin with its id: "
                f"{cut} --keep-last 1000 --dry-run"
            )

    if report["damaged"] and report["threads"] is None:
        advice.append(
            "restore the damaged thread from a backup: until then the threads cannot "
            "be listed; a thread whose id you know can be saved with: "
            + command_line("export", url, "THREAD")
        )
    elif report["damaged"]:
        advice.append(
            "restore the damaged threads from a backup; save the others with: "
            + command_line("export", url)
        )

    if not report["probe"]["ok"]:
        advice.append(
            "run cpkit certify on an empty store: it shows which promise is broken"
        )

    return advice


def _space(path: str | None) -> dict[str, str]:
    """Return what is left where the store is, for people to read."""
    if path is None or not hasattr(os, "statvfs"):
        return {}

    left = os.statvfs(path)
    files = f", {left.f_favail} files" if left.f_files else ""  # some have no limit
    return {"space left": f"{size(left.f_bavail * left.f_frsize)}{files}"}


def _is_nearly_full(path: str) -> bool:
    left = os.statvfs(path)
    has_few = bool(left.f_files) and left.f_favail < _LOW_FILES
    return has_few or left.f_bavail * left.f_frsize < _LOW_BYTES


def _as_json(oldest: Waiting) -> dict[str, Any]:
    record = oldest.record
    return {
        "kind": "call" if oldest.request is None else "approval",
        "thread_id": record.thread_id,
        "key": oldest.key,
        "tool": record.call.tool_name
        if oldest.request is None
        else oldest.request.tool,
        "issued_at": record.issued_at.isoformat(),
    }


def _print(report: dict[str, Any]) -> None:
    threads = report["threads"]
    bound = report["threads_bound"]
    is_bounded = threads is not None and bound is not None and threads >= bound
    oldest = report["oldest_pending"]
    lines = {
        "store": report["url"],
        "cpkit": f"{report['cpkit']} on Python {report['python']}",
        "driver": report["driver"],
        "schema": report["schema_version"] and f"version {report['schema_version']}",
        "size": report["bytes"] is not None and size(report["bytes"]),
        "durability": f"{report['survives']}, less than this store's default: "
        f"{report['survives_by_default']}"
        if report["is_weak"]
        else report["survives"],
        "settings": ", ".join(
            f"{name}={value}" for name, value in (report["settings"] or {}).items()
        ),
        **report["facts"],
        "limits": _lowered_limits(report),
        "threads": threads is not None
        and f"{threads}{' or more' if is_bounded else ''}",
        "longest": ", ".join(
            f"{one['thread_id']} ({counted(one['messages'], 'message')})"
            for one in report["longest_threads"]
        ),
        "largest": ", ".join(one["words"] for one in report["largest_threads"])
        + (f", of the first {bound} threads" if is_bounded else ""),
        "pending": threads is not None
        and "none" + (f" in the first {bound} threads" if is_bounded else "")
        if oldest is None
        else f"oldest {oldest['kind']} since "
        f"{age(datetime.fromisoformat(oldest['issued_at']))}: "
        f"{oldest['tool']} in thread {oldest['thread_id']}",
        "probe": report["probe"]["words"],
    }
    console = stdout()

    for name, value in lines.items():
        if value:
            console.print(f"{name:<11} {printable(str(value))}")

    for damage in report["damaged"]:
        console.print(f"damaged     {printable(damage)}", style="red")

    if not report["advice"]:
        console.print("advice      none: there is nothing to change", style="green")

    for advice in report["advice"]:
        console.print(f"advice      {printable(advice)}", style="yellow")


def _lowered_limits(report: dict[str, Any]) -> str:
    """Return the limits that the engine or an option sets below the defaults."""
    defaults = {"max_payload": MAX_PAYLOAD, "max_append": MAX_APPEND}
    return ", ".join(
        f"{name}={report[name]} bytes"
        for name, default in defaults.items()
        if report[name] is not None and report[name] < default
    )
