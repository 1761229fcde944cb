"""``cpkit export``: write threads as lines of JSON."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from cpkit.cli.output import progress, write, write_json_line
from cpkit.cli.running import Exit, fail, print_stderr, run
from cpkit.cli.stores import no_thread, open_store, store_url
from cpkit.driver.seal import LineSeal
from cpkit.driver.sealed import SealedStore
from cpkit.protocol import ListsThreads, MovesThreads
from cpkit.registry import driver_names
from cpkit.tools.copying import Problem, export_lines
from cpkit.tools.formats import counted
from cpkit.tools.paging import find_thread

__all__ = ["export"]

Words = Annotated[
    list[str] | None,
    typer.Argument(
        help="The store's URL, unless CPKIT_URL is set; then threads (default: all).",
        metavar="[URL] [THREAD]...",
        show_default=False,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Write this new file, readable by its owner only.",
        show_default="standard output",
    ),
]


InTheClear = Annotated[
    bool, typer.Option("--open", help="Write an encrypted store in the clear.")
]


def export(
    words: Words = None, output: Output = None, in_the_clear: InTheClear = False
) -> None:
    """Export threads exactly, as lines of JSON.

    Each has its messages, extra, calls and times. Deleted threads that keep the keys
    of their calls are exported too. `cpkit copy NAME.jsonl DST` imports such a file.
    The file appears under its name when it is complete. A thread that is damaged, or
    whose key is missing, is named and left out; then the command exits with 1. The
    lines of an encrypted store are encrypted too, under the newest key of the keyring.
    """
    if output is None:
        _, damaged = run(_export(words or [], write_json_line, in_the_clear))
        write("")  # what is still in the buffer
    else:
        count, damaged = _to_file(words or [], output, in_the_clear)
        print_stderr(f"exported {counted(count, 'thread')} to {output}")

    if damaged:
        raise typer.Exit(Exit.NO)


def _to_file(words: list[str], output: Path, in_the_clear: bool) -> tuple[int, int]:
    """Write a temporary file, and give it its name when it is complete."""
    try:
        if output.exists():
            fail(Exit.BAD_USE, f"{output} already exists; choose another name")

        descriptor, draft = tempfile.mkstemp(
            prefix=f".{output.name}.", dir=output.parent
        )
    except OSError as exc:
        fail(Exit.BAD_USE, f"{output}: {exc.strerror}")

    try:
        with open(descriptor, "wb") as file:
            counts = run(_export(words, file.write, in_the_clear))
            file.flush()
            os.fsync(file.fileno())

        _give_name(draft, output)
    except OSError as exc:
        fail(Exit.BAD_USE, f"{output}: {exc.strerror}")
    finally:
        with suppress(FileNotFoundError):  # it has its name
            os.unlink(draft)

    return counts


def _give_name(draft: str, output: Path) -> None:
    """Move a file to a name; raise ``FileExistsError`` if another file has it."""
    try:
        # Unlike a rename, a link does not replace a file that was created meanwhile.
        os.link(draft, output)
    except FileExistsError:
        raise
    except OSError:  # the file system has no hard links: exFAT, some network shares
        # Taking the name first keeps that promise. If this process dies before the
        # rename, an empty file stays, which `cpkit copy` refuses.
        os.close(os.open(output, os.O_CREAT | os.O_EXCL, 0o600))

        try:
            os.replace(draft, output)
        except OSError:
            os.unlink(output)
            raise


async def _export(
    words: list[str], put: Callable[[bytes], object], in_the_clear: bool
) -> tuple[int, int]:
    """Return how many threads were exported, and how many could not be read."""
    url, named = _split_words(words)
    ids = list(dict.fromkeys(named))
    count = damaged = number = 0

    def report(problem: Problem) -> None:
        nonlocal damaged
        damaged += 1
        print_stderr(f"not exported: {problem}")

    async with open_store(url, ListsThreads, MovesThreads) as cp:
        for thread_id in ids:
            if await find_thread(cp, thread_id, erased=True) is None:
                raise no_thread(url, thread_id)

        store = getattr(cp, "store", None)
        seal = None

        if isinstance(store, SealedStore) and not in_the_clear:
            seal = LineSeal(store.keyring)

        with progress("exporting", len(ids) or None) as advance:
            async for line in export_lines(cp, ids or None, on_damage=report):
                number += 1
                put(line if seal is None else seal.sealed(line, number))

                if line.startswith(b'{"end"'):
                    advance(1)
                    count += 1

    return count, damaged


def _split_words(words: list[str]) -> tuple[str, list[str]]:
    """Split the words into a URL and thread ids.

    A first word with the scheme of a driver is the URL, and so is any first word if
    CPKIT_URL is not set.
    """
    if words and words[0].partition(":")[0].lower() in driver_names():
        return words[0], words[1:]

    if words and not os.environ.get("CPKIT_URL"):
        return words[0], words[1:]

    return store_url(None), words
