"""The command line: every command is a function in a file of the same name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

import cpkit
from cpkit.cli.bench import bench
from cpkit.cli.calls import calls
from cpkit.cli.certify import certify
from cpkit.cli.copy import copy
from cpkit.cli.decide import approve, deny, withdraw
from cpkit.cli.doctor import doctor
from cpkit.cli.doubt import landed, not_landed, reopen
from cpkit.cli.drivers import drivers
from cpkit.cli.erase import erase
from cpkit.cli.export import export
from cpkit.cli.heal import heal
from cpkit.cli.help import GroupedCommands, PlainCommand
from cpkit.cli.import_ import import_
from cpkit.cli.keyring import keyring
from cpkit.cli.new_backend import new_backend
from cpkit.cli.output import write
from cpkit.cli.pending import pending
from cpkit.cli.prune import prune
from cpkit.cli.recover import recover
from cpkit.cli.rewrap import rewrap
from cpkit.cli.runs import runs, submit
from cpkit.cli.show import show
from cpkit.cli.threads import threads
from cpkit.cli.tree import tree
from cpkit.cli.ui import ui
from cpkit.cli.watch import watch
from cpkit.cli.worker import worker

__all__ = ["app"]

COMMANDS: dict[Callable[..., None], str] = {
    drivers: "cpkit drivers",
    doctor: "cpkit doctor postgresql://me@db.example.com/agents",
    threads: "cpkit threads sqlite:///agent.db --prefix user-",
    show: "cpkit show sqlite:///agent.db thread-1 --last 5",
    tree: "cpkit tree sqlite:///agent.db session-1 --all",
    calls: "cpkit calls sqlite:///agent.db thread-1 --full",
    watch: "cpkit watch sqlite:///agent.db thread-1 --json",
    pending: "cpkit pending redis://localhost:6379/0",
    approve: "cpkit approve redis://localhost:6379/0 3f9a --by anna",
    deny: "cpkit deny redis://localhost:6379/0 3f9a --reason 'too much'",
    withdraw: "cpkit withdraw redis://localhost:6379/0 3f9a --by anna",
    landed: "cpkit landed sqlite:///agent.db 3f9a --result '\"ch_1\"' --by anna",
    not_landed: "cpkit not-landed sqlite:///agent.db 3f9a --by anna",
    reopen: "cpkit reopen sqlite:///agent.db thread-1 3f9a --by anna",
    runs: "cpkit runs sqlite:///agent.db",
    submit: "cpkit submit sqlite:///agent.db thread-1 --after 2h",
    heal: "cpkit heal sqlite:///agent.db thread-1",
    recover: "cpkit recover sqlite:///agent.db thread-1 my_agent:tools",
    worker: "cpkit worker postgresql://me@localhost/agents my_agent:run --health 30",
    ui: "cpkit ui sqlite:///agent.db --open",
    copy: "cpkit copy sqlite:///agent.db postgresql://me@localhost/agents",
    export: "cpkit export sqlite:///agent.db thread-1 --output thread-1.jsonl",
    import_: "cpkit import checkpoints.sqlite sqlite:///agent.db --dry-run",
    prune: "cpkit prune sqlite:///agent.db --older-than 30d --dry-run",
    erase: "cpkit erase sqlite:///agent.db --prefix user-7/ --yes > receipt.json",
    keyring: "cpkit keyring keyring.json --name agents",
    rewrap: "cpkit rewrap sqlite:///agent.db",
    new_backend: "cpkit new-backend mariadb --kind server",
    certify: "cpkit certify sqlite:///probe.db --level core",
    bench: "cpkit bench sqlite:///bench.db postgresql://me@localhost/bench --quick",
}
"""Each command, and the example in its help."""

app = typer.Typer(
    cls=GroupedCommands,
    help="Inspect and manage the durable state of agents.",
    epilog="Without a URL, a command uses CPKIT_URL, or sqlite:///cpkit.db. "
    "Exit codes: 0 done, 1 the answer is no, 2 bad use, 3 store unavailable.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        write(f"cpkit {cpkit.__version__}\n")
        raise typer.Exit


@app.callback()
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


def _add(command: Callable[..., Any], example: str) -> None:
    epilog = f"\b\nExample:\n  {example}"
    name = command.__name__.rstrip("_").replace("_", "-")
    app.command(name, cls=PlainCommand, epilog=epilog)(command)


for _command, _example in COMMANDS.items():
    _add(_command, _example)
