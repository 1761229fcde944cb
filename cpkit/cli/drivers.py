"""``cpkit drivers``: list the installed drivers."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from cpkit.cli.output import print_json, print_table
from cpkit.cli.stores import Json
from cpkit.registry import GROUP

__all__ = ["drivers"]


def drivers(json: Json = False) -> None:
    """List the kinds of stores that this installation can open."""
    found = [_row(entry) for entry in sorted(entry_points(group=GROUP))]

    if json:
        print_json({"drivers": found})
        return

    print_table(
        ["scheme", "driver", "package", "state"],
        [
            (one["scheme"], one["driver"], one["package"], one["error"] or "ready")
            for one in found
        ],
    )


def _row(entry: EntryPoint) -> dict[str, str | None]:
    dist = entry.dist
    error = None

    try:
        entry.load()
    except (ImportError, AttributeError) as exc:
        error = f"not installed: {exc}"

    return {
        "scheme": entry.name,
        "driver": entry.value,
        "package": "?" if dist is None else f"{dist.name} {dist.version}",
        "error": error,
    }
