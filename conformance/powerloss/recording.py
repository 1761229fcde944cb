"""Run a writer under strace, and return its system calls and what it reported."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from conformance.failure import Failure, Skip
from conformance.harness import Harness, address
from conformance.powerloss.trace import TRACED, Call, calls
from conformance.slowdown import slowdown

__all__ = ["Report", "record", "reports", "run_writer", "tracer"]

_TIMEOUT = 40
"""Seconds for a writer, under a tracer that makes it several times slower."""


class Report(NamedTuple):
    """A client's step that was acknowledged, or, with an ``error``, that failed.

    ``again``: it is not the step, but the write that follows one that failed.
    """

    client: int
    step: int
    error: str = ""
    maybe_applied: bool = True
    reason: str = ""
    again: bool = False


def reports(call: Call) -> list[Report]:
    """Return what a call reported."""
    if call.name != "sendto" or not call.descriptor()[1].startswith(
        ("socket:", "UNIX")
    ):
        return []

    text = call.text(1)
    # A packet of a server can begin with "[" too.
    is_report = text.startswith(b"[") and text.endswith(b"]\n")
    return _parsed(text) if is_report else []


def _parsed(text: bytes) -> list[Report]:
    return [Report(*json.loads(line)) for line in text.splitlines()]


async def record(
    harness: Harness, job: dict[str, Any], options: Sequence[str] = ()
) -> list[Call]:
    """Run a writer of the harness's store until it ends, and return its calls.

    ``options`` are strace's. Raises `Skip` where the writer cannot be traced.
    """
    if shutil.which("strace") is None:
        raise Skip("not tested: strace is missing; install the package strace")

    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        errors = await _run([*tracer(trace), *options], harness, job)

        if not trace.exists() or "ptrace" in errors:
            raise Skip(
                "not tested: this system does not allow ptrace; allow it, in Docker "
                "with --cap-add=SYS_PTRACE"
            )

        with trace.open(encoding="ascii", errors="replace") as lines:
            return list(calls(lines.readlines(), os.getcwd()))


def tracer(trace: Path) -> list[str]:
    """Return the command that runs another one and records its calls in a file."""
    return [
        *("strace", "-f", "--seccomp-bpf", "-qq", "-o", str(trace)),
        *("-y", "-xx", "-s", "99999999", "-e", "signal=none"),
        *("-e", "trace=" + ",".join(f"?{name}" for name in TRACED)),
        *("-e", "raw=?read,?readv"),
    ]


async def run_writer(harness: Harness, job: dict[str, Any]) -> list[Report]:
    """Run a writer without a tracer, and return what it reported."""
    ours, its = socket.socketpair()

    with ours:
        await _run([], harness, job, its)
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        text = b""

        while chunk := await loop.sock_recv(ours, 65536):
            text += chunk

        return _parsed(text)


async def _run(
    tracer: list[str],
    harness: Harness,
    job: dict[str, Any],
    output: socket.socket | None = None,
) -> str:
    """Run a writer until it ends, and return what it wrote to its standard error."""
    text = json.dumps({"path": sys.path, "harness": address(harness), **job})
    ours = None

    if output is None:
        ours, output = socket.socketpair()  # the trace has what is written there

    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *(*tracer, sys.executable, "-m", "conformance.powerloss.writer"),
            stdin=asyncio.subprocess.PIPE,
            stdout=output.fileno(),
            stderr=errors,
            # Bytecode that an import writes is not the store's.
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,
        )
        output.close()
        assert process.stdin is not None

        try:
            process.stdin.write(f"{text}\n".encode())

            # Its standard input stays open until it has ended: see conformance.parent.
            async with asyncio.timeout(_TIMEOUT * slowdown()):
                await process.wait()
        except TimeoutError:
            expected = f"an end of the writer within {_TIMEOUT * slowdown():g} s"
            raise Failure(expected, "it still runs") from None
        finally:
            if ours is not None:
                ours.close()

            process.stdin.close()

            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)  # the tracer and the writer
                await process.wait()

        errors.seek(0)
        printed = errors.read().decode(errors="replace")

    if process.returncode:
        raise Failure("another process to use the store", printed[-4000:])

    return printed
