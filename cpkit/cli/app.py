"""The verbs, put together; each is a function in a file of its name."""

from __future__ import annotations

import typer

from cpkit.cli.certify import certify
from cpkit.cli.tree import tree

__all__ = ["app"]

app = typer.Typer(
    help="Look after the durable state of agents.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _verbs() -> None:
    """Keep the verb in the command, also while there is only one."""


app.command()(certify)
app.command()(tree)
