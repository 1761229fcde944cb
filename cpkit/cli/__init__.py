"""The command line: ``cpkit COMMAND``, with one file for each command.

Exit codes: 0 done, 1 the answer is no, 2 bad use, 3 store unavailable; 130 after
Ctrl-C, 141 when the reader of standard output closed the pipe.
"""

from __future__ import annotations

import errno
import io
import os
import sys

from cpkit.registry import MissingExtra, needs_extra

__all__ = ["main"]

_INTERRUPTED = 130  # Exit.INTERRUPTED; its module is not imported yet

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """Run the command that ``sys.argv`` names, and exit the process."""
    _reopen_closed_streams()
    _buffer_output()

    try:
        code = _run()
    except KeyboardInterrupt:  # also while modules are imported, which takes a moment
        code = _INTERRUPTED

    sys.exit(code)


def _run() -> int:
    """Run the command, and return its exit code."""
    try:
        with needs_extra("the command line", "cli"):
            import rich
            import typer
    except MissingExtra as exc:
        sys.stderr.write(f"{exc}\n")
        return 2

    del rich
    from cpkit.cli.app import app_for
    from cpkit.cli.output import discard_output, escape_unencodable
    from cpkit.cli.running import BadUse, Exit, print_stderr
    from cpkit.registry import redacted

    escape_unencodable()

    try:
        words = sys.argv[1:] or ["--help"]
        code: int = app_for(words)(words, prog_name="cpkit", standalone_mode=False)
    except typer.Abort:
        code = _INTERRUPTED
    except typer.TyperException as exc:
        context = getattr(exc, "ctx", None)
        path = context.command_path if context else "cpkit"
        message = exc.format_message()

        for word in words:  # a URL with a password may stand in the wrong place
            message = message.replace(word, redacted(word))

        print_stderr(f"{message} (see {path} --help)")
        code = Exit.BAD_USE
    except BadUse as exc:  # of a command that reads its words before it opens a store
        print_stderr(str(exc))
        code = Exit.BAD_USE
    except OSError as exc:
        if exc.filename is not None or exc.errno not in _FULL:
            raise

        discard_output()
        print_stderr(f"standard output: {exc.strerror}")
        code = Exit.BAD_USE

    return code


def _reopen_closed_streams() -> None:
    """Open the null device for each standard stream that the caller has closed.

    Otherwise the next file that is opened, such as a store's, takes its number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))


def _buffer_output() -> None:
    """Give standard output a buffer, which ``PYTHONUNBUFFERED`` takes away.

    A stopped and continued process or a full disk cuts a write short. A stream with a
    buffer then writes the rest or raises; one without drops it.
    """
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):
        sys.stdout = open(
            sys.stdout.fileno(),
            "w",
            encoding=sys.stdout.encoding,
            errors=sys.stdout.errors,
            closefd=False,
        )
