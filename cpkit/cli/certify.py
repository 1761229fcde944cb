"""``cpkit certify``: check a store against the contract, print its certificate."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from cpkit.cli.output import stderr, stdout, write
from cpkit.cli.running import Exit, fail
from cpkit.errors import BackendUnavailable, CheckpointerError

if TYPE_CHECKING:
    from conformance import Clause, Outcome, Report, Status

__all__ = ["certify"]

Target = Annotated[
    str, typer.Argument(help="A URL, or package.module:factory.", show_default=False)
]
Levels = Annotated[
    list[str] | None,
    typer.Option(
        "--level",
        help="core, optional, concurrent, durable or bounded; may be repeated.",
        show_default="all that apply",
    ),
]
Clauses = Annotated[
    list[str] | None,
    typer.Option(
        "--clause",
        help="Check only this clause or subject; may be repeated.",
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
Rounds = Annotated[float, typer.Option(help="Factor for the length of slow clauses.")]


def certify(
    target: Target,
    level: Levels = None,
    clause: Clauses = None,
    json: Json = False,
    junit: JUnit = None,
    markdown: Markdown = None,
    seed: Seed = None,
    rounds: Rounds = 1.0,
) -> None:
    """Check a store against the contract, clause by clause, and print a certificate.

    Use a store made for the purpose: what the clauses write stays in it. Exits with
    0 if every clause that was checked holds, 1 if a clause fails, 2 for bad use and 3
    if the store cannot be opened.
    """
    # Find a factory in the current folder, as `python -m` does.
    sys.path.insert(0, os.getcwd())
    levels, clauses = level or [], clause or []

    try:
        # Here and not at the top: cpkit does not depend on its suite.
        import conformance as suite

        total = len(suite.select(levels, clauses))
    except ModuleNotFoundError as exc:
        if exc.name not in ("hypothesis", "pytest"):
            raise

        fail(Exit.BAD_USE, "certify needs: pip install 'cpkit[conformance]'")
    except ValueError as exc:
        fail(Exit.BAD_USE, str(exc))

    try:
        with _progress(total) as (on_start, on_outcome):
            report = asyncio.run(
                suite.certify(
                    target,
                    levels=levels,
                    clauses=clauses,
                    seed=seed,
                    rounds=rounds,
                    on_start=on_start,
                    on_outcome=on_outcome,
                )
            )
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None
    except BackendUnavailable as exc:
        fail(Exit.UNAVAILABLE, str(exc))
    except (CheckpointerError, ValueError) as exc:
        fail(Exit.BAD_USE, str(exc))

    if junit is not None:
        junit.write_text(report.to_junit(), encoding="utf-8")

    if markdown is not None:
        markdown.write_text(report.to_markdown(), encoding="utf-8")

    if json:
        write(report.to_json() + "\n")
    else:
        _print(stdout(markup=True), report, suite.SUITE_VERSION, list(suite.Status))

    _leave(
        Exit.DONE if report.ok else Exit.NO, {one.clause.id for one in report.failures}
    )


@contextmanager
def _progress(
    total: int,
) -> Iterator[tuple[Callable[[Clause], None], Callable[[Outcome], None]]]:
    """Show a progress bar on a terminal's standard error.

    Yields the callbacks for a clause that starts and for one that has an outcome.
    """
    console = stderr()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]}", style="red"),
    )

    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("opening", total=total, failed="")
        failed = 0

        def on_start(clause: Clause) -> None:
            progress.update(bar, description=f"{clause.level:<10} {clause.id:<40}")

        def on_outcome(outcome: Outcome) -> None:
            nonlocal failed
            failed += outcome.status == "failed"
            shown = f"{failed} failed" if failed else ""
            progress.update(bar, advance=1, failed=shown)

        yield on_start, on_outcome


def _print(
    console: Console, report: Report, version: str, statuses: Sequence[Status]
) -> None:
    for outcome in report.failures:
        console.print(f"\n[red bold]fails[/] [bold]{escape(outcome.clause.id)}[/]")
        console.print(f"  {escape(outcome.clause.sentence)}", highlight=False)
        _labelled(console, "expected", outcome.expected)
        _labelled(console, "seen", outcome.seen)
        _labelled(console, "where", outcome.where)
        _labelled(console, "again", report.again(outcome))

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
    console.print(f"durability  {escape(report.durability)}", highlight=False)

    if report.sizes:
        console.print(f"limits      {report.sizes}", highlight=False)

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


def _leave(code: Exit, failed: set[str]) -> NoReturn:
    """Exit; if a clause still hangs in its thread, exit without waiting for it.

    The interpreter would wait for that thread.
    """
    if any(thread.name in failed for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    raise typer.Exit(code)
