"""``cpkit certify``: check a store against the contract, print its certificate."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cpkit.cli.output import stdout, write
from cpkit.cli.running import Exit, fail
from cpkit.errors import BackendUnavailable, CheckpointerError
from cpkit.registry import MissingExtra
from cpkit.tools.formats import counted

if TYPE_CHECKING:
    from conformance import Outcome, Report, Status

__all__ = ["certify"]

Target = Annotated[
    str | None,
    typer.Argument(
        help="A URL, or package.module:name of a factory or of a harness.",
        show_default=False,
    ),
]
Levels = Annotated[
    list[str] | None,
    typer.Option(
        "--level",
        help="core, optional, concurrent, durable, bounded, powerloss or replicated.",
        show_default="all that apply",
    ),
]
Clauses = Annotated[
    list[str] | None,
    typer.Option(
        "--clause",
        help="Check only this clause or subject, of the levels that you name; may be "
        "repeated.",
        metavar="ID",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the report as JSON instead of a table.")
]
JUnit = Annotated[
    Path | None, typer.Option(help="Also write the report as JUnit XML to this file.")
]
Markdown = Annotated[
    Path | None, typer.Option(help="Also write the report as Markdown to this file.")
]
Seed = Annotated[
    int | None, typer.Option(help="Seed of the random choices.", show_default="random")
]
Jobs = Annotated[
    int, typer.Option(min=1, help="Processes among which the clauses are shared.")
]
ExitFirst = Annotated[
    bool, typer.Option("-x", "--exitfirst", help="Stop at the first clause that fails.")
]
MaxFail = Annotated[
    int | None,
    typer.Option(
        min=1, help="Stop when so many clauses have failed.", show_default=False
    ),
]
Listing = Annotated[
    bool, typer.Option("--list", help="Print the clauses and check nothing.")
]
Rounds = Annotated[float, typer.Option(help="Factor for the length of slow clauses.")]


def certify(
    target: Target = None,
    level: Levels = None,
    clause: Clauses = None,
    json: Json = False,
    junit: JUnit = None,
    markdown: Markdown = None,
    seed: Seed = None,
    rounds: Rounds = 1.0,
    jobs: Jobs = 1,
    exitfirst: ExitFirst = False,
    maxfail: MaxFail = None,
    listing: Listing = False,
) -> None:
    """Check a store against the contract; print a certificate.

    Use a store made for the purpose: what the clauses write stays in it. Exits with
    0 if every clause that was checked holds, 1 if a clause fails or a level that you
    name has no clause that could be checked, 2 for bad use and 3 if the store cannot be
    opened.
    """
    # Find a factory in the current folder, as `python -m` does.
    sys.path.insert(0, os.getcwd())
    levels, clauses = level or [], clause or []

    try:
        # Here and not at the top: cpkit does not depend on its suite.
        import conformance as suite

        chosen = suite.select(levels, clauses)
    except (MissingExtra, ValueError) as exc:
        fail(Exit.BAD_USE, str(exc))

    if listing:
        for one in chosen:
            write(f"{one.level:<10}  {one.id:<48}  {one.sentence}\n")

        return

    if target is None:
        fail(
            Exit.BAD_USE,
            "name a store: a URL, or package.module:name of a factory or of a harness",
        )

    console = stdout(markup=True)
    most = 1 if exitfirst else maxfail
    interrupted = False

    try:
        run = suite.Certification(
            target, levels=levels, clauses=clauses, seed=seed, rounds=rounds, jobs=jobs
        )
        _check_writable(junit, markdown)

        if run.jobs < jobs and not json:
            console.print("one job: only one process can open the store")

        try:
            for n, outcome in enumerate(run, 1):
                if not json:
                    _came(console, run.report(), outcome, f"{n}/{len(run.clauses)}")

                if len(run.report().failures) == most:
                    break
        except KeyboardInterrupt:
            interrupted = True
    except BackendUnavailable as exc:
        fail(Exit.UNAVAILABLE, str(exc))
    except (CheckpointerError, ValueError) as exc:
        fail(Exit.BAD_USE, str(exc))

    report = run.report()

    if junit is not None:
        junit.write_text(report.to_junit(), encoding="utf-8")

    if markdown is not None:
        markdown.write_text(report.to_markdown(), encoding="utf-8")

    if json:
        write(report.to_json() + "\n")
    else:
        _print(console, report, suite.SUITE_VERSION, list(suite.Status))

    if interrupted:
        _leave_at_once(Exit.INTERRUPTED)

    # A clause that hangs is still in its thread, which the interpreter would wait for.
    failed = {one.clause.id for one in report.failures}

    if any(thread.name in failed for thread in threading.enumerate()):
        _leave_at_once(Exit.NO)

    raise typer.Exit(Exit.DONE if report.ok else Exit.NO)


def _check_writable(*files: Path | None) -> None:
    """End the command now, not after a run that may take an hour."""
    for file in files:
        if file is not None:
            try:
                with file.open("a"):
                    pass
            except OSError as exc:
                fail(Exit.BAD_USE, f"{file}: {exc.strerror}")


def _came(console: Console, report: Report, outcome: Outcome, count: str) -> None:
    """Print an outcome at once: a line, or all about a failure."""
    if outcome.status == "failed":
        first, *_ = report.same_error(outcome)

        if first is outcome:
            _failed(console, report, outcome)
            return

        console.print(
            f"[red bold]  fails[/] [bold]{escape(outcome.clause.id)}[/]: the same "
            f"error as {escape(first.clause.id)}",
            highlight=False,
            soft_wrap=True,
        )
        return

    console.print(
        f"[dim]{count:>7}[/] {outcome.status:<11} {escape(outcome.clause.id)}",
        highlight=False,
    )


def _failed(console: Console, report: Report, outcome: Outcome) -> None:
    """Print what was expected, what was seen, where, and the command to repeat it."""
    console.print(f"\n[red bold]fails[/] [bold]{escape(outcome.clause.id)}[/]")
    console.print(f"  {escape(outcome.clause.sentence)}", highlight=False)
    _labelled(console, "expected", outcome.expected)
    _labelled(console, "seen", outcome.seen)
    _labelled(console, "where", outcome.where)
    _labelled(console, "again", report.again(outcome, as_given=True))
    console.print()


def _print(
    console: Console, report: Report, version: str, statuses: Sequence[Status]
) -> None:
    told: list[Outcome] = []
    table = Table(title=f"{escape(report.target)} by suite {version}")
    table.add_column("level")
    table.add_column("verdict")

    for status in statuses:
        table.add_column(status, justify="right")

    colours = {"holds": "green", "fails": "red bold", "not asked": "dim"}

    for level in report.levels:
        counts, verdict = report.counts(level), report.verdict(level)
        table.add_row(
            level,
            f"[{colours[verdict]}]{verdict}[/]",
            *(str(counts[status] or "") for status in statuses),
        )

    console.print()
    console.print(table)
    console.print(f"promised    {escape(report.durability)}", highlight=False)
    console.print(f"survived    {report.survived}", highlight=False)

    if report.failovers:
        console.print(f"failovers   lost {report.failovers}", highlight=False)

    if report.unfinished:
        console.print(f"interrupted {counted(report.unfinished, 'clause')} not run")

    if report.sizes:
        console.print(f"limits      {report.sizes}", highlight=False)

    for first, *others in map(report.same_error, report.failures):
        if others and first not in told:
            told.append(first)
            console.print(
                f"same error  in {counted(len(others), 'other clause')} since "
                f"{escape(first.clause.id)}",
                highlight=False,
            )

    for reason, ids in report.unasked.items():
        console.print(
            f"not asked   {escape(', '.join(ids))}: {escape(reason)}", highlight=False
        )

    console.print(f"seed        {report.seed}", highlight=False)


def _labelled(console: Console, label: str, text: str) -> None:
    head, *rest = text.splitlines() or [""]
    # Not wrapped, so that a command can be copied as one line.
    console.print(
        f"  [dim]{label:<9}[/] {escape(head)}", highlight=False, soft_wrap=True
    )

    for line in rest:
        console.print(f"            {escape(line)}", highlight=False, soft_wrap=True)


def _leave_at_once(code: Exit) -> NoReturn:
    """Exit without waiting for the thread of a clause."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
