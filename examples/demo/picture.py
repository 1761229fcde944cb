"""Display a run: a progress bar for each conversation, and a line for each event.

Without a terminal it prints the lines only, without colours.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from .recordings import Conversation
from .run import MOMENTS, WORST, Event, Kill
from .verdict import Finding

__all__ = ["Picture"]

_DOING = {
    "claimed": "claimed",
    "effect": "done by the airline",
    "recorded": "on record",
    "replayed": "answered from the record",
}


class Picture:
    """Prints the events of a run; shows the bars while it is entered as a context."""

    def __init__(self, conversations: list[Conversation]) -> None:
        self._console = Console(highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}", style="cyan"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[doing]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._bars: dict[str, TaskID] = {
            c.thread_id: self._progress.add_task(
                c.name, total=len(c.messages), doing=""
            )
            for c in conversations
        }
        self.started()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def head(self, *lines: tuple[str, str]) -> None:
        """Print the settings of the run, as names and values."""
        for name, value in lines:
            self._print((f"{name:<10}", "dim"), value)

        self._print("")

    def started(self) -> None:
        self._loaded: dict[str, Event] = {}
        self._notes: list[str] = []

    def happened(self, event: Event) -> None:
        thread = event["thread"]

        match event["what"]:
            case "loaded":
                resumed = self._is_resumed()
                self._loaded[thread] = event
                self._set_progress(thread, event["version"])

                if self._is_resumed() and not resumed:
                    self._print_restart()
            case "appended":
                self._set_progress(thread, event["version"])
            case "planned":
                plan = ", ".join(event["plan"])
                self._set_status(thread, f"[dim]plan: {escape(plan)}" if plan else "")
            case "resolved" if event["landed"]:
                self._note(event, "in the airline's books, so recorded")
            case "resolved":
                self._note(event, "not in the airline's books, so made")
            case what if what in _DOING:
                self._set_status(thread, f"{escape(event['tool'])}: {_DOING[what]}")

    def killed(self, kill: Kill) -> None:
        self._print_notes()
        what = MOMENTS[kill.moment] + (f": {kill.tool}" if kill.tool else "")
        self._print(
            (f"kill -9  {kill.number:>2}  ", "bold red"),
            (what, "red" if kill.moment == WORST else ""),
        )

        for thread in self._bars:
            self._set_status(thread, "[red]killed")

    def lost_primary(self, address: str) -> None:
        self._print(
            ("kill -9      ", "bold red"), f"the primary {address} of the store"
        )

    def result(self, findings: list[Finding], verdict: str) -> None:
        """Print every finding, and the verdict."""
        holds = all(finding.holds is not False for finding in findings)
        marks = {
            True: Text("ok", "green"),
            False: Text("BROKEN", "bold red"),
            None: Text(""),
        }
        self._print("")

        if self._console.is_terminal:
            table = Table(box=box.SIMPLE_HEAD, show_header=False)

            for finding in findings:
                table.add_row(
                    Text(finding.what, "bold"),
                    Text("\n".join(finding.seen)),
                    marks[finding.holds],
                )

            self._console.print(table)
        else:
            for finding in findings:
                seen = "; ".join(finding.seen)
                self._print(f"{finding.what}: {seen} ", marks[finding.holds])

            self._print("")

        self._print((verdict, "bold green" if holds else "bold red"))

    def took(self, seconds: float, folder: Path) -> None:
        self._print((f"{seconds:.0f} s. Store, books and log are in {folder}", "dim"))

    def foot(self, url: str) -> None:
        # The command beside this interpreter, because its folder may not be in PATH.
        command = os.path.relpath(Path(sys.executable).parent / "cpkit")
        self._print("A refund waits for your decision.")
        self._print(
            ("Look at it, and decide:  ", "dim"), f"{command} ui {shlex.quote(url)}"
        )

    def _is_resumed(self) -> bool:
        """Return whether the worker has loaded every conversation."""
        return len(self._loaded) == len(self._bars)

    def _print_restart(self) -> None:
        messages = sum(event["version"] for event in self._loaded.values())
        pending = sum(event["pending"] for event in self._loaded.values())

        if messages:
            unclear = f", {_plural(pending, 'unclear call')}" if pending else ""
            self._print(
                ("restart      ", "green"), f"{_plural(messages, 'message')}{unclear}"
            )

        self._print_notes()

    def _note(self, event: Event, what: str) -> None:
        self._notes.append(f"{event['tool']}: {what}")

        if self._is_resumed():
            self._print_notes()

    def _print_notes(self) -> None:
        for note in self._notes:
            self._print(f"             {note}")

        self._notes.clear()

    def _set_progress(self, thread: str, version: int) -> None:
        self._progress.update(self._bars[thread], completed=version)
        self._set_status(thread, "")

    def _set_status(self, thread: str, what: str) -> None:
        """Show a conversation's status, or that it is done."""
        bar = self._bars[thread]
        done = self._progress.tasks[bar].finished
        self._progress.update(bar, doing="[green]done" if done else what)

    def _print(self, *parts: str | tuple[str, str] | Text) -> None:
        # In a file, lines are not wrapped.
        wraps = self._console.is_terminal
        self._console.print(Text.assemble(*parts), soft_wrap=not wraps)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)
