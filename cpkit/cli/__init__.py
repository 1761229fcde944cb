"""The command line: ``cpkit VERB``, one file a verb.

Exit codes: 0 done, 1 the answer is no, 2 bad use, 3 store unavailable.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command that the process's arguments name, and exit."""
    try:
        from cpkit.cli.app import app
    except ModuleNotFoundError as exc:
        if exc.name not in ("typer", "rich"):
            raise

        sys.stderr.write("the command line needs: pip install 'cpkit[cli]'\n")
        sys.exit(2)

    app()
