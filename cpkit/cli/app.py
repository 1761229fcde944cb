"""The command line: every command is a function in a file, mostly of the same name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated

import typer

import cpkit
from cpkit.cli.help import GroupedCommands, PlainCommand
from cpkit.cli.output import write

__all__ = ["COMMANDS", "app_for"]

COMMANDS = {
    "drivers": ("drivers", ""),
    "doctor": ("doctor", "postgresql://me@db.example.com/agents"),
    "threads": ("threads", "sqlite:///agent.db --prefix user-"),
    "show": ("show", "sqlite:///agent.db thread-1 --last 5"),
    "tree": ("tree", "sqlite:///agent.db session-1 --all"),
    "calls": ("calls", "sqlite:///agent.db thread-1 --full"),
    "watch": ("watch", "sqlite:///agent.db thread-1 --json"),
    "pending": ("pending", "redis://localhost:6379/0"),
    "approve": ("decide", "redis://localhost:6379/0 3f9a --by anna"),
    "deny": ("decide", "redis://localhost:6379/0 3f9a --reason 'too much'"),
    "withdraw": ("decide", "redis://localhost:6379/0 3f9a --by anna"),
    "landed": ("doubt", "sqlite:///agent.db 3f9a --result '\"ch_1\"' --by anna"),
    "not-landed": ("doubt", "sqlite:///agent.db 3f9a --by anna"),
    "reopen": ("doubt", "sqlite:///agent.db thread-1 3f9a --by anna"),
    "runs": ("runs", "sqlite:///agent.db"),
    "submit": ("runs", "sqlite:///agent.db thread-1 --after 2h"),
    "heal": ("heal", "sqlite:///agent.db thread-1"),
    "recover": ("recover", "sqlite:///agent.db thread-1 my_agent:tools"),
    "worker": ("worker", "postgresql://me@localhost/agents my_agent:run --health 30"),
    "ui": ("ui", "sqlite:///agent.db --open"),
    "copy": ("copy", "sqlite:///agent.db postgresql://me@localhost/agents"),
    "export": ("export", "sqlite:///agent.db thread-1 --output thread-1.jsonl"),
    "import": ("import_", "checkpoints.sqlite sqlite:///agent.db --dry-run"),
    "prune": ("prune", "sqlite:///agent.db --older-than 30d --dry-run"),
    "erase": ("erase", "sqlite:///agent.db --prefix user-7/ --yes > receipt.json"),
    "keyring": ("keyring", "keyring.json --name agents"),
    "rewrap": ("rewrap", "sqlite:///agent.db"),
    "new-backend": ("new_backend", "mariadb --kind server"),
    "certify": ("certify", "sqlite:///probe.db --level core"),
    "bench": ("bench", "sqlite:///bench.db postgresql://me@localhost/bench --quick"),
}
"""Each command: the module with its function, and the words of its example."""


def app_for(words: Sequence[str]) -> typer.Typer:
    """Return the app that runs these words.

    It imports only the command that they name, since importing all of them takes longer
    than most commands do. The help and the error for an unknown command need them all.
    """
    first = words[0] if words else "--help"

    if first in COMMANDS:
        return _app_of([first])

    return _app_of([] if first == "--version" else COMMANDS)


def _app_of(names: Iterable[str]) -> typer.Typer:
    app = typer.Typer(
        cls=GroupedCommands,
        help="Inspect and manage the durable state of agents.",
        epilog="Without a URL, a command uses CPKIT_URL, or sqlite:///cpkit.db. "
        "Exit codes: 0 done, 1 the answer is no, 2 bad use, 3 store unavailable.",
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)

    for name in names:
        module, example = COMMANDS[name]
        function = "import_" if name == "import" else name.replace("-", "_")
        command = getattr(import_module(f"cpkit.cli.{module}"), function)
        epilog = f"\b\nExample:\n  cpkit {name} {example}".rstrip()
        app.command(name, cls=PlainCommand, epilog=epilog)(command)

    return app


def _print_version(value: bool) -> None:
    if value:
        write(f"cpkit {cpkit.__version__}\n")
        raise typer.Exit


def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version of cpkit.",
        ),
    ] = False,
) -> None:
    """Inspect and manage the durable state of agents."""
