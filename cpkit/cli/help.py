"""The text of ``--help``: commands in groups, arguments without their types."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

__all__ = ["GROUPS", "GroupedCommands", "PlainCommand"]

GROUPS = {
    "Look at a store": "drivers doctor threads show tree calls watch ui",
    "Decide": "pending approve deny withdraw landed not-landed reopen",
    "Run": "runs submit worker recover heal",
    "Move and delete": "copy export import prune erase",
    "Encrypt": "keyring rewrap",
    "Check and measure": "new-backend certify bench",
}
"""The commands under each heading of ``cpkit --help``."""

# What typer prints for the type of an argument or an option.
_TYPES = {
    r"<(list\[)?str\]?>": "TEXT",
    r"<(int|float)( range)?>": "N",
    r"<path>": "FILE",
}


class GroupedCommands(TyperGroup):
    """Lists the commands under headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = formatter.width - 4 - max(map(len, self.commands))
        grouped: set[str] = set()

        for heading, names in [*GROUPS.items(), ("Other", " ".join(self.commands))]:
            rows = [
                (name, self.commands[name].get_short_help_str(width))
                for name in names.split()
                if name in self.commands and name not in grouped
            ]
            grouped.update(name for name, _ in rows)

            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


class PlainCommand(TyperCommand):
    """Prints arguments by their names, without the types of their values."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = (one for one in self.params if one.param_type_name == "argument")
        return ["[OPTIONS]", *(one.metavar or one.name.upper() for one in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}

        for one in self.get_params(ctx):
            if record := one.get_help_record(ctx):
                name, text = record

                if one.param_type_name == "argument":
                    name = one.metavar or one.name.upper()

                for pattern, plain in _TYPES.items():
                    name = re.sub(pattern, plain, name)

                rows[one.param_type_name].append((name, text))

        for kind, found in rows.items():
            if found:
                with formatter.section(f"{kind.title()}s"):
                    formatter.write_dl(found)
