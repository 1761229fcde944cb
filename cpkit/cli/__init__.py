"""The command line: ``cpkit COMMAND``, with one file for each command.

Exit codes: 0 done, 1 the answer is no, 2 bad use, 3 store unavailable; 130 after
Ctrl-C, 141 when the reader of standard output closed the pipe.
"""

from __future__ import annotations

import sys

from cpkit.extras import MissingExtra, needs_extra

__all__ = ["main"]


def main() -> None:
    """Run the command that ``sys.argv`` names, and exit the process."""
    try:
        with needs_extra("the command line", "cli"):
            import rich
            import typer
    except MissingExtra as exc:
        sys.stderr.write(f"{exc}\n")
        sys.exit(2)

    del rich
    from cpkit.cli.app import app
    from cpkit.cli.output import escape_unencodable
    from cpkit.cli.running import BadUse, Exit, print_stderr

    escape_unencodable()

    try:
        words = sys.argv[1:] or ["--help"]
        code = app(words, prog_name="cpkit", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = Exit.INTERRUPTED
    except typer.TyperException as exc:
        context = getattr(exc, "ctx", None)
        path = context.command_path if context else "cpkit"
        print_stderr(f"{exc.format_message()} (see {path} --help)")
        code = Exit.BAD_USE
    except BadUse as exc:  # of a command that reads its words before it opens a store
        print_stderr(str(exc))
        code = Exit.BAD_USE

    sys.exit(code)
