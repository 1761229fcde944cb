"""Run the benchmarks and write the report: ``python -m benchmarks``, ``make bench``."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.figures import Figures
from benchmarks.goals import DRIVERS
from benchmarks.layers import decoding, layers
from benchmarks.once import once_trials
from benchmarks.place import POSTGRES_SETTINGS, Place, private_place
from benchmarks.processes import append_cost, crowd_rate, import_times, load_memory
from benchmarks.roster import CPKIT, FLOOR, ROSTER
from benchmarks.wake import wake
from cpkit.tools.benchmark import (
    FAMILIES,
    NORMAL,
    QUICK,
    Contender,
    Result,
    Scale,
    Stored,
    interleaved,
    trials,
)

SEPARATE = ("once", "layers", "costs", "memory", "processes", "import", "wake")
HERE = Path(__file__).parent
REPORT = HERE / "report"
RESULTS = HERE.parent / "build" / "bench" / "results.json"
PACKAGES = """
    cpkit aiosqlite asyncpg redis hiredis pydantic langgraph-checkpoint-sqlite
    langgraph-checkpoint-postgres openai-agents cubeloop agent-ledger
    exactly-once ledger-once
""".split()

# The messages that the quick run loads for memory; the goal is for 100,000.
QUICK_LOAD = 20_000


def main() -> None:
    """Measure what the arguments name, keep the results, and write the report."""
    options = _parsed(sys.argv[1:])

    if options.again:
        run = json.loads(options.results.read_text(encoding="utf-8"))
    else:
        run = _measured(options)

    report.write(run, options.report)
    verdicts = Figures(run).verdicts()

    for verdict in verdicts:
        if not verdict.met:
            _log(
                f"not met: {verdict.driver}, {verdict.title}: {verdict.here} "
                f"({verdict.wanted})"
            )

    met = sum(verdict.met for verdict in verdicts)
    _log(f"{met} of {len(verdicts)} goals met; see {options.report}/report.md")


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    known = (*FAMILIES, *SEPARATE)
    add("--only", type=_names(DRIVERS), default=DRIVERS, help=",".join(DRIVERS))
    add("--workloads", type=_names(known), default=known, help=",".join(known))
    add("--rounds", type=int, help="counted rounds of each workload (5; quick: 2)")
    add("--quick", action="store_true", help="a short run of about two minutes")
    add("--no-peers", action="store_true", help="measure floors and cpkit only")
    add("--largest", type=int, help="messages of the largest thread (100000)")
    add("--folder", help="where the SQLite and file stores are created, and removed")
    add("--results", type=Path, default=RESULTS, help="the file of all samples")
    add("--report", type=Path, default=REPORT, help="the folder of the report")
    add("--add", action="store_true", help="keep what --results has of other drivers")
    add("--again", action="store_true", help="measure nothing: report --results again")
    options = parser.parse_args(arguments)

    if (options.again or options.add) and not options.results.exists():
        parser.error(f"{options.results} does not exist: run without this option first")

    if options.rounds is None:
        options.rounds = 2 if options.quick else 5

    if options.rounds < 1:
        parser.error("--rounds is at least 1")

    return options


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        asked = tuple(text.split(","))

        for name in asked:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"unknown name {name!r}; known are: {', '.join(known)}"
                )

        return asked

    return names


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    scale = replace(QUICK, tasks=(64,)) if options.quick else NORMAL

    if options.largest is not None:
        sizes = tuple(size for size in scale.sizes if size <= options.largest)
        scale = replace(scale, sizes=sizes)

    run: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": " ".join(sys.argv[1:]) or "none",
        "versions": _versions(),
        "durability": {},
        "skipped": {},
        "results": [],
        "layers": [],
        "decoding": {},
        "costs": [],
        "memory": [],
        "crowd": [],
        "imports": {},
        "wake": [],
        "machine": {},
    }

    if options.add:
        run |= _of_others(options)

    with private_place(options.only, options.folder) as place:
        run["machine"] |= _machine(place)

        for driver in options.only:
            began, started = datetime.now(UTC), time.monotonic()
            contenders = _contenders(driver, place, run, peers=not options.no_peers)
            asyncio.run(_together(driver, contenders, scale, options, run))
            _in_processes(contenders, place, scale, options, run)

            if "wake" in options.workloads:
                rows = asyncio.run(wake(driver, place, 20 if options.quick else 100))
                run["wake"] += rows

                for row in rows:
                    _log("  ".join(f"{key} {value}" for key, value in row.items()))

            took = f"at {began:%Y-%m-%dT%H:%M}, for {time.monotonic() - started:.0f} s"
            run["machine"][f"{driver} was measured"] = took
            _save(run, options.results)

    if "layers" in options.workloads:
        run["decoding"] = decoding(options.rounds)

    if "import" in options.workloads:
        run["imports"] = import_times(3 if options.quick else 15)

    _save(run, options.results)
    return run


def _save(run: dict[str, Any], results: Path) -> None:
    """Write all samples, also after each driver: a later one may fail."""
    text = json.dumps(run, indent=1, ensure_ascii=False)
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(text + "\n", encoding="utf-8")


def _of_others(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the last results have of drivers that are not measured now."""
    run: dict[str, Any] = json.loads(options.results.read_text(encoding="utf-8"))
    rows = {name: run[name] for name in run if isinstance(run[name], list)}
    kept = {
        name: [row for row in some if row["driver"] not in options.only]
        for name, some in rows.items()
    }
    named = {
        name: {
            label: value
            for label, value in run[name].items()
            if label.partition(",")[0] not in options.only
        }
        for name in ("durability", "skipped")
    }
    return (
        kept | named | {name: run[name] for name in ("decoding", "imports", "machine")}
    )


def _contenders(
    driver: str, place: Place, run: dict[str, Any], *, peers: bool
) -> list[Contender]:
    """Return the driver's contenders; record those whose package is missing."""
    made = []

    for entry in ROSTER:
        if entry.driver != driver:
            continue

        try:
            contender = entry.make(place)
        except ImportError as exc:
            reason = f"{exc}; pip install 'cpkit[bench]'"
            run["skipped"][f"{driver}, {entry.name}"] = reason
            continue

        if peers or contender.kind != "peer":
            made.append(contender)

    return made


async def _together(
    driver: str,
    contenders: list[Contender],
    scale: Scale,
    options: argparse.Namespace,
    run: dict[str, Any],
) -> None:
    """Run the workloads in this process; all contenders take part in each round."""
    async with AsyncExitStack() as stack:
        for contender in contenders:
            await stack.enter_async_context(contender)

        promises = {one.name: one.durability for one in contenders}
        run["durability"][driver] = promises

        for family in FAMILIES:
            if family not in options.workloads:
                continue

            started = time.monotonic()
            found = await interleaved(trials(family, contenders, scale), options.rounds)
            run["results"] += [_plain(result) | {"family": family} for result in found]
            _log(f"{driver}: {family}, {time.monotonic() - started:.0f} s")

        if "once" in options.workloads:
            started = time.monotonic()
            found = await interleaved(once_trials(contenders, scale), options.rounds)
            run["results"] += [_plain(result) | {"family": "once"} for result in found]
            _log(f"{driver}: once, {time.monotonic() - started:.0f} s")

        if "layers" in options.workloads:
            started = time.monotonic()
            named = {contender.name: contender for contender in contenders}
            ours = named[CPKIT]
            assert isinstance(ours, Stored)
            found = await interleaved(
                await layers(named[FLOOR], ours.url, scale, stack), options.rounds
            )
            run["layers"] += [_plain(result) for result in found]
            _log(f"{driver}: layers, {time.monotonic() - started:.0f} s")


def _plain(result: Result) -> dict[str, Any]:
    """Return a result as JSON values; log a failed one."""
    if result.error is not None:
        _log(f"  {result.name}, {result.workload}: {result.error}")

    median = result.median if result.rounds else None
    return asdict(result) | {"median": median, "spread": result.spread}


def _in_processes(
    contenders: list[Contender],
    place: Place,
    scale: Scale,
    options: argparse.Namespace,
    run: dict[str, Any],
) -> None:
    """Measure in separate processes; the stores exist by now."""
    largest = QUICK_LOAD if options.quick else 100_000

    if options.largest is not None:
        largest = min(largest, options.largest)

    able = [one for one in contenders if {"append", "load"} <= one.abilities]

    if options.quick:
        able = [one for one in able if one.name in (FLOOR, CPKIT)]

    def costs(contender: Contender) -> None:
        cost = append_cost(contender, place, 100 if options.quick else 400)
        run["costs"].append(_named(contender) | asdict(cost))

    def memory(contender: Contender) -> None:
        growth = load_memory(contender, place, largest)
        run["memory"].append(_named(contender) | {"size": largest, "bytes": growth})

    def processes(contender: Contender) -> None:
        rate = crowd_rate(contender, place, 1.0 if options.quick else 4.0)
        run["crowd"].append(_named(contender) | {"rate": rate})

    for name, measure in (
        ("costs", costs),
        ("memory", memory),
        ("processes", processes),
    ):
        if name not in options.workloads:
            continue

        started = time.monotonic()

        for contender in able:
            try:
                measure(contender)
            except Exception as exc:
                label = f"{contender.driver}, {contender.name}, {name}"
                run["skipped"][label] = str(exc)
                _log(f"  {label}: {exc}")

        _log(f"{able[0].driver}: {name}, {time.monotonic() - started:.0f} s")


def _named(contender: Contender) -> dict[str, Any]:
    return {"driver": contender.driver, "name": contender.name}


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}

    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"

    return found


def _machine(place: Place) -> dict[str, str]:
    """Return the facts about the machine that the figures depend on."""
    settings = ", ".join(f"{k}={v}" for k, v in POSTGRES_SETTINGS.items())
    return {
        "when": datetime.now(UTC).isoformat(timespec="minutes"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processors": str(os.cpu_count()),
        "load before": " ".join(f"{one:.1f}" for one in os.getloadavg()),
        "file system": _file_system(place.folder),
        "Postgres": f"{settings}; fsync and synchronous_commit on",
    }


def _file_system(folder: str) -> str:
    """Return the type of the file system that a folder is on; tmpfs syncs for free."""
    mounts = Path("/proc/mounts")

    if not mounts.exists():
        return "unknown"

    rows = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    real = os.path.realpath(folder)
    within = [(len(at), kind) for at, kind in rows if f"{real}/".startswith(at)]
    return max(within)[1]


def _log(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    main()
