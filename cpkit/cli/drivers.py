"""``cpkit drivers``: which stores can be opened here."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from cpkit.cli.output import print_json, print_table
from cpkit.cli.stores import Json
from cpkit.registry import GROUP

__all__ = ["drivers"]


def drivers(json: Json = False) -> None:
    """List the kinds of stores that can be opened here."""
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
        extra = entry.module.partition(".")[0].removeprefix("cpkit_")
        is_ours = dist is not None and dist.name == "cpkit"
        mend = f": pip install 'cpkit[{extra}]'" if is_ours else ""
        error = f"not installed ({exc}){mend}"

    return {
        "scheme": entry.name,
        "driver": entry.value,
        "package": "?" if dist is None else f"{dist.name} {dist.version}",
        "error": error,
    }
