"""``cpkit bench``: how long the operations of a store take, of one or of several."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from typing import Annotated, Any
from uuid import uuid4

import typer

from cpkit.cli.output import print_json, print_table, progress, write
from cpkit.cli.running import BadUse, Exit, run, say
from cpkit.cli.stores import Json, shown
from cpkit.registry import open_checkpointer
from cpkit.tools.benchmark import (
    FAMILIES,
    NORMAL,
    QUICK,
    Result,
    Scale,
    Stored,
    Trial,
    interleaved,
    trials,
)

__all__ = ["bench"]

Urls = Annotated[
    list[str],
    typer.Argument(
        help="Where the stores are; one that is not there is created.",
        metavar="URL...",
        show_default=False,
    ),
]
Workloads = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        help=f"{', '.join(FAMILIES)}; may be repeated.",
        show_default="all",
    ),
]
Rounds = Annotated[int, typer.Option(help="Rounds that are counted.", min=1)]
Largest = Annotated[
    int, typer.Option(help="Messages of the longest thread that is made.", min=1)
]
Quick = Annotated[bool, typer.Option("--quick", help="Less of everything, for a look.")]


def bench(
    urls: Urls,
    workload: Workloads = None,
    rounds: Rounds = 5,
    largest: Largest = 10_000,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Measure a store, or several in turn, through the public methods alone.

    What is written goes into threads of its own, which are deleted afterwards, with
    their keys, where the store can. A store that is in use is slowed down meanwhile.
    Figures are microseconds at the median over rounds. Exits with 1 where something did
    not come back as it was written.
    """
    results, stores, left = run(
        _measured(urls, workload or list(FAMILIES), rounds, largest, quick)
    )

    if json:
        print_json(_document(stores, results))
    else:
        _print(stores, results)

    for result in results:
        if result.error is not None:
            say(f"{result.name}, {result.workload}: {result.error}")

    if left:
        say(f"{left} threads stay, because the store deletes none")

    failed = any(result.error is not None for result in results)
    raise typer.Exit(Exit.NO if failed else Exit.DONE)


async def _measured(
    urls: Sequence[str], families: list[str], rounds: int, largest: int, quick: bool
) -> tuple[list[Result], list[Stored], int]:
    """Measure, and clean up; the number is of threads that could not be deleted."""
    for family in families:
        if family not in FAMILIES:
            raise BadUse(f"{family!r} is none of: {', '.join(FAMILIES)}")

    for url in urls:
        open_checkpointer(url)  # a wrong one is told before any is measured

    scale = QUICK if quick else NORMAL
    scale = replace(scale, sizes=tuple(n for n in scale.sizes if n <= largest))
    stores = _stores(urls)
    left = 0

    async with AsyncExitStack() as stack:
        for store in stores:
            await stack.enter_async_context(store)

        try:
            results = await _in_turn(stores, families, scale, rounds)
        finally:
            for store in stores:
                left += await store.erase()

    return results, stores, left


async def _in_turn(
    stores: list[Stored], families: list[str], scale: Scale, rounds: int
) -> list[Result]:
    plan = [trials(name, stores, scale) for name in FAMILIES if name in families]
    results: list[Result] = []

    # Each trial is prepared, warmed up, measured in each round, and checked.
    with progress("measuring", sum(map(len, plan)) * (rounds + 3)) as advance:

        def tell(_trial: Trial, _step: str) -> None:
            advance(1)

        for family in plan:
            results += await interleaved(family, rounds, tell)

    return results


def _stores(urls: Sequence[str]) -> list[Stored]:
    """Return the contenders; a URL given twice is measured twice."""
    prefix = f"cpkit-bench:{uuid4().hex[:8]}"
    stores = []

    for number, url in enumerate(urls, 1):
        name = shown(url) + (f" ({number})" if urls.count(url) > 1 else "")
        scheme = url.partition(":")[0]
        stores.append(Stored(scheme, url, name=name, prefix=f"{prefix}:{number}"))

    return stores


def _print(stores: list[Stored], results: list[Result]) -> None:
    found = {(one.name, one.workload): one for one in results if one.error is None}
    rows = []

    for workload in dict.fromkeys(result.workload for result in results):
        base = found.get((stores[0].name, workload))
        cells = (found.get((store.name, workload)) for store in stores)
        rows.append([workload, *(_cell(cell, base) for cell in cells)])

    names = [store.name for store in stores]
    print_table(["workload", *names], rows, right=" ".join(names))

    for store in stores:
        write(f"{store.name}  {store.durability}\n")


def _cell(result: Result | None, base: Result | None) -> str:
    """Return time and spread, or a rate; and how it stands to the first store."""
    if result is None:
        return "–"

    if result.workload.startswith("tasks"):
        text = f"{1 / result.median:,.0f} a second"
    else:
        text = f"{result.median * 1e6:,.0f} ±{result.spread * 1e6:,.0f} µs"

    if base is not None and base is not result:
        text += f" ({result.median / base.median:.2f}× the time)"

    return text


def _document(stores: list[Stored], results: list[Result]) -> dict[str, Any]:
    return {
        "unit": "seconds per operation",
        "durability": {store.name: store.durability for store in stores},
        "results": [
            asdict(result)
            | {
                "median": result.median if result.rounds else None,
                "spread": result.spread,
            }
            for result in results
        ],
    }
