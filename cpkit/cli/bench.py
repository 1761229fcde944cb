"""``cpkit bench``: measure how long the operations of one or more stores take."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from typing import Annotated, Any
from uuid import uuid4

import typer

from cpkit.cli.output import print_json, print_table, progress, write
from cpkit.cli.running import BadUse, Exit, print_stderr, run
from cpkit.cli.stores import Json, display_url
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
from cpkit.tools.formats import counted

__all__ = ["bench"]

Urls = Annotated[
    list[str],
    typer.Argument(
        help="The stores to measure; a missing store is created.",
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
Rounds = Annotated[int, typer.Option(help="How many rounds to measure.", min=1)]
Largest = Annotated[int, typer.Option(help="Messages in the longest thread.", min=1)]
Quick = Annotated[bool, typer.Option("--quick", help="A short run with rough figures.")]


def bench(
    urls: Urls,
    workload: Workloads = None,
    rounds: Rounds = 5,
    largest: Largest = 10_000,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Measure stores in turn, through the public methods.

    The benchmark writes into threads of its own. If the store can delete threads, they
    are deleted afterwards, together with their keys. The benchmark slows down agents
    that use the store. Figures are microseconds, the median over the rounds. Exits
    with 1 if the store returns something other than what was written.
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
            print_stderr(f"{result.name}, {result.workload}: {result.error}")

    if left:
        print_stderr(
            f"not deleted: {counted(left, 'benchmark thread')}, because this store "
            "cannot delete threads"
        )

    failed = any(result.error is not None for result in results)
    raise typer.Exit(Exit.NO if failed else Exit.DONE)


async def _measured(
    urls: Sequence[str], families: list[str], rounds: int, largest: int, quick: bool
) -> tuple[list[Result], list[Stored], int]:
    """Measure, and delete the threads; also return how many could not be deleted."""
    for family in families:
        if family not in FAMILIES:
            raise BadUse(
                f"unknown --workload {family!r}; choose from {', '.join(FAMILIES)}"
            )

    for url in urls:
        open_checkpointer(url)  # raises for a wrong URL before anything is measured

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

    # A trial has a step for each round, and three more: prepare, warm up, check.
    with progress("measuring", sum(map(len, plan)) * (rounds + 3)) as advance:

        def on_step(_trial: Trial, _step: str) -> None:
            advance(1)

        for family in plan:
            results += await interleaved(family, rounds, on_step)

    return results


def _stores(urls: Sequence[str]) -> list[Stored]:
    """Return one contender for each URL, also for a URL that is given twice."""
    prefix = f"cpkit-bench:{uuid4().hex[:8]}"
    stores = []

    for number, url in enumerate(urls, 1):
        name = display_url(url) + (f" ({number})" if urls.count(url) > 1 else "")
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
    """Return time and spread, or a rate, and the ratio to the first store."""
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
