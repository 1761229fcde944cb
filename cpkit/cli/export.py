"""``cpkit export``: a store's threads as lines of JSON."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from cpkit.cli.output import progress, write_json_line
from cpkit.cli.running import Exit, No, give_up, run, say
from cpkit.cli.stores import Store, opened, store_url
from cpkit.protocol import KeepsReceipts, ListsThreads
from cpkit.records import ThreadInfo
from cpkit.registry import driver_names
from cpkit.tools.copying import export_lines

__all__ = ["export"]

Words = Annotated[
    list[str] | None,
    typer.Argument(
        help="Where the store is, unless CPKIT_URL says it; then threads, or all.",
        metavar="[URL] [THREAD]...",
        show_default=False,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Write this file, for its owner alone; it must not be there yet.",
        show_default="standard output",
    ),
]


def export(words: Words = None, output: Output = None) -> None:
    """Export threads as lines of JSON.

    Each thread comes with its messages, extra and calls. `cpkit copy NAME.jsonl DST`
    brings an export back. A file is there when it is whole, and not before.
    """
    if output is None:
        run(_export(words or [], write_json_line))
    else:
        count = _to_file(words or [], output)
        say(f"exported {count} threads to {output}")


def _to_file(words: list[str], output: Path) -> int:
    """Write a draft beside the file, which takes its name when it is whole."""
    try:
        if output.exists():
            give_up(Exit.BAD_USE, f"{output} is there already; name another file")

        descriptor, draft = tempfile.mkstemp(
            prefix=f".{output.name}.", dir=output.parent
        )
    except OSError as exc:
        give_up(Exit.BAD_USE, f"{output}: {exc.strerror}")

    try:
        with open(descriptor, "wb") as file:
            count = run(_export(words, file.write))
            file.flush()
            os.fsync(file.fileno())

        # Unlike a rename, a link does not take the place of what came meanwhile.
        os.link(draft, output)
    except OSError as exc:
        give_up(Exit.BAD_USE, f"{output}: {exc.strerror}")
    finally:
        os.unlink(draft)

    return count


async def _export(words: list[str], put: Callable[[bytes], object]) -> int:
    url, ids = _divided(words)
    count = 0

    async with opened(url, ListsThreads, KeepsReceipts) as cp:
        threads = [await _info(cp, one) for one in ids] if ids else None

        with progress("exporting", len(ids) or None) as advance:
            async for line in export_lines(cp, threads):
                put(line)

                if line.startswith(b'{"end"'):
                    advance(1)
                    count += 1

    return count


async def _info(cp: Store, thread_id: str) -> ThreadInfo:
    for info in await cp.list_threads(prefix=thread_id, limit=1):
        if info.thread_id == thread_id:
            return info

    if await cp.list_calls(thread_id):
        now = datetime.now(UTC)
        return ThreadInfo(thread_id, 0, now, now)  # deleted; its keys are kept

    raise No(f"there is no thread {thread_id!r}; cpkit threads lists them")


def _divided(words: list[str]) -> tuple[str, list[str]]:
    """Tell a URL by its scheme; a thread's id that looks like one needs the URL."""
    if words and words[0].partition(":")[0].lower() in driver_names():
        return words[0], words[1:]

    if words and not os.environ.get("CPKIT_URL"):
        return words[0], words[1:]

    return store_url(None), words
