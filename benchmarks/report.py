"""The report: tables and plots, rendered from the results of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.chart import chart
from benchmarks.figures import Figures
from benchmarks.goals import DRIVERS
from benchmarks.roster import FLOOR

__all__ = ["write"]

_CURVES = {"append": "One append", "load": "Load of the whole thread"}

_TITLES = {
    "append": "One append, by messages in the thread",
    "tasks": "Appends a second by many concurrent tasks",
    "load": "Load of the whole thread, by messages in it",
    "tail": "The last twenty messages, by messages in the thread",
    "calls": "Claim, result and find of a call; and the replay of a finished call",
    "once": "A plain function that runs once: a fresh call, and a replayed one",
    "extra": "One key of extra, among a hundred others",
    "open": "Open and close",
}


def write(run: dict[str, Any], folder: Path) -> None:
    """Write report.md and the plots into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = Figures(run)
    plots = dict(_plots(figures))

    for name, svg in plots.items():
        (folder / name).write_text(svg, encoding="utf-8")

    lines = [*_head(run), *_goals(figures)]

    for driver in DRIVERS:
        measured = (*run["results"], *run["layers"], *run["costs"], *run["wake"])

        if any(one["driver"] == driver for one in measured):
            lines += _driver(figures, driver, plots)

    lines += [*_decoding(run), *_imports(run)]
    (folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _head(run: dict[str, Any]) -> Iterator[str]:
    yield "# cpkit compared with its floors and its peers"
    yield ""
    yield (
        "Written by `python -m benchmarks`. "
        "[docs/performance.md](../../docs/performance.md) explains how to read it."
    )
    yield ""

    for name, value in run["machine"].items():
        yield f"- {name}: {value}"

    yield f"- options: {run['options']}"
    yield f"- versions: {', '.join(f'{k} {v}' for k, v in run['versions'].items())}"

    for name, reason in run["skipped"].items():
        yield f"- not measured: {name}: {reason}"

    for result in (*run["results"], *run["layers"]):
        if result["error"] is not None:
            yield (
                f"- failed: {result['driver']}, {result['name']}, "
                f"{result['workload']}: {result['error']}"
            )


def _goals(figures: Figures) -> Iterator[str]:
    verdicts = figures.verdicts()
    met = sum(verdict.met for verdict in verdicts)
    yield from ["", "## Goals", "", f"{met} of {len(verdicts)} met.", ""]
    yield from _table(
        ["driver", "ratio of", "goal", "here", ""],
        [
            [v.driver, v.title, v.wanted, v.here, "met" if v.met else "not"]
            for v in verdicts
        ],
    )
    slower = figures.slower_than()
    yield ""

    if slower:
        yield "A peer is as fast or faster in:"
        yield ""
        yield from (
            f"- {driver}, {workload}: {name}, cpkit takes {ratio:.2f}× as long"
            for driver, workload, name, ratio in slower
        )
    else:
        yield "cpkit is faster than every peer in every cell, except open and close."


def _driver(figures: Figures, driver: str, plots: dict[str, str]) -> Iterator[str]:
    yield from ["", f"## {driver}", "", "What an acknowledgement survives:", ""]

    for name, words in figures.run["durability"][driver].items():
        yield f"- {name}: {words}"

    results = [r for r in figures.run["results"] if r["driver"] == driver]

    for family, title in _TITLES.items():
        found = [r for r in results if r["family"] == family and r["error"] is None]

        if found:
            yield from ["", f"### {title}", ""]
            yield from _family(found, _rate if family == "tasks" else _time)

        if f"{family}-{driver}.svg" in plots:
            yield from ["", f"![{title}]({family}-{driver}.svg)"]

    yield from _layers(figures, driver)
    yield from _costs(figures, driver)
    yield from _wake(figures, driver)


def _family(
    results: list[dict[str, Any]],
    cell: Callable[[dict[str, Any], dict[str, Any] | None], str],
) -> Iterator[str]:
    """Return a table with a row for each contender and a column for each workload."""
    workloads = list(dict.fromkeys(result["workload"] for result in results))
    names = list(dict.fromkeys(result["name"] for result in results))
    found = {(result["name"], result["workload"]): result for result in results}
    rows = [
        [
            name,
            *(
                cell(found[name, workload], found.get((FLOOR, workload)))
                if (name, workload) in found
                else "–"
                for workload in workloads
            ),
        ]
        for name in names
    ]
    return _table(["", *workloads], rows)


def _time(result: dict[str, Any], floor: dict[str, Any] | None) -> str:
    """Return median, spread and ratio; and the mean where it is far from the median."""
    text = f"{_micros(result['median'])} ±{_micros(result['spread'])}"

    if floor is not None:
        text += f" ({result['median'] / floor['median']:.2f}×)"

    if result["mean"] > 2 * result["median"]:
        text += f", mean {_micros(result['mean'])}"

    return text


def _rate(result: dict[str, Any], floor: dict[str, Any] | None) -> str:
    """Return operations a second, and their multiple of the floor's."""
    text = f"{1 / result['median']:,.0f}/s"

    if floor is not None:
        text += f" ({floor['median'] / result['median']:.2f}×)"

    return text


def _layers(figures: Figures, driver: str) -> Iterator[str]:
    steps = [one for one in figures.run["layers"] if one["driver"] == driver]

    for workload in dict.fromkeys(step["workload"] for step in steps):
        found = [
            one for one in steps if (one["workload"], one["error"]) == (workload, None)
        ]
        before = [None, *found]
        yield from ["", f"### Where the time of {workload} goes", ""]
        yield from _table(
            ["up to this layer", "µs", "of the floor", "more than the row above"],
            [
                [
                    step["name"],
                    f"{_micros(step['median'])} ±{_micros(step['spread'])}",
                    f"{step['median'] / found[0]['median']:.2f}×",
                    ""
                    if lower is None
                    else f"{(step['median'] - lower['median']) * 1e6:+,.0f}",
                ]
                for lower, step in zip(before, found, strict=False)
            ],
        )


def _decoding(run: dict[str, Any]) -> Iterator[str]:
    if run["decoding"]:
        yield from ["", "## Decoding 10,000 messages, without fetching", ""]
        yield from _table(
            ["", "µs per message"],
            [[name, f"{took * 1e6:.2f}"] for name, took in run["decoding"].items()],
        )


def _costs(figures: Figures, driver: str) -> Iterator[str]:
    run = figures.run
    costs = [cost for cost in run["costs"] if cost["driver"] == driver]

    if costs:
        yield from ["", "### Cost of one append to a thread of 1,000 messages", ""]
        yield from _table(
            ["", "fsyncs", "bytes written", "counted by"],
            [
                [
                    cost["name"],
                    "–" if cost["fsyncs"] is None else f"{cost['fsyncs']:.2f}",
                    "–" if cost["bytes"] is None else f"{cost['bytes']:,.0f}",
                    "; ".join([cost["counted"], *cost["why"]]),
                ]
                for cost in costs
            ],
        )

    memory = [one for one in run["memory"] if one["driver"] == driver]

    if memory:
        size = memory[0]["size"]
        yield from ["", f"### Peak memory of a load of {size:,} messages", ""]
        yield "Peak resident memory (VmHWM) above the memory before the load, in MiB."
        yield ""
        yield from _table(
            ["", "MiB"],
            [[one["name"], f"{one['bytes'] / 2**20:,.0f}"] for one in memory],
        )

    crowd = [one for one in run["crowd"] if one["driver"] == driver]

    if crowd:
        yield from ["", "### Four processes with 16 tasks each, on one store", ""]
        yield from _table(
            ["", "appends a second"],
            [[one["name"], f"{one['rate']:,.0f}"] for one in crowd],
        )


def _wake(figures: Figures, driver: str) -> Iterator[str]:
    rows = [row for row in figures.run["wake"] if row["driver"] == driver]

    if rows:
        yield from ["", "### Waking another process, and the price of it", ""]
        yield from _table(
            ["", "changes", "figures"],
            [
                [
                    row["what"],
                    str(row.get("changes", "–")),
                    ", ".join(
                        f"{name} {value:,}"
                        for name, value in row.items()
                        if name not in ("driver", "what", "changes")
                    ),
                ]
                for row in rows
            ],
        )


def _imports(run: dict[str, Any]) -> Iterator[str]:
    if run["imports"]:
        yield from ["", "## Imports, in a fresh process", ""]
        yield from _table(
            ["", "ms"],
            [[name, f"{took * 1e3:.1f}"] for name, took in run["imports"].items()],
        )


def _plots(figures: Figures) -> Iterator[tuple[str, str]]:
    for family, title in _CURVES.items():
        for driver in DRIVERS:
            lines: dict[str, dict[float, float]] = {}

            for (where, workload), found in figures.of.items():
                kind, _, size = workload.partition("@")

                if (where, kind) == (driver, family):
                    for name, seconds in found.items():
                        lines.setdefault(name, {})[int(size)] = seconds * 1e6

            if any(len(line) > 1 for line in lines.values()):
                svg = chart(f"{title}: {driver}", "messages in the thread", lines)
                yield f"{family}-{driver}.svg", svg


def _table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|---|{'---:|' * (len(head) - 1)}"

    for row in rows:
        yield f"| {' | '.join(row)} |"


def _micros(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}"
