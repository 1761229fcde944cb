"""Run a writer under strace, and return its system calls and what it reported."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from conformance.failure import Failure, Skip
from conformance.fork_server import start_worker
from conformance.harness import Harness, address
from conformance.parent import place_of_parent
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
        ours, its = socket.socketpair()

        with ours:  # not read any more: the trace has the reports
            await _run(harness, job, ours, its, [*tracer(trace), *options])

        with trace.open(encoding="ascii", errors="replace") as lines:
            return list(calls(lines.readlines(), os.getcwd()))


def tracer(trace: Path) -> list[str]:
    """Return the command that records the calls of a process in a file."""
    return [
        *("strace", "-f", "-o", str(trace)),
        *("-y", "-xx", "-s", "99999999", "-e", "signal=none"),
        *("-e", "trace=" + ",".join(f"?{name}" for name in TRACED)),
        *("-e", "raw=?read,?readv"),
    ]


async def run_writer(harness: Harness, job: dict[str, Any]) -> list[Report]:
    """Run a writer without a tracer, and return what it reported."""
    ours, its = socket.socketpair()

    with ours:
        await _run(harness, job, ours, its)
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        text = b""

        while chunk := await loop.sock_recv(ours, 65536):
            text += chunk

        return _parsed(text)


async def _run(
    harness: Harness,
    job: dict[str, Any],
    ours: socket.socket,
    its: socket.socket,
    tracer: Sequence[str] = (),
) -> None:
    """Run a writer until it ends; it reports to the socket."""
    text = json.dumps({"place": place_of_parent(), "harness": address(harness), **job})
    limit = _TIMEOUT * slowdown()

    with tempfile.TemporaryFile() as errors:
        # Its input stays open until it has ended: see conformance.parent.
        its_input, our_end = os.pipe()
        files = its_input, its.fileno(), errors.fileno()
        process = start_worker(*files, "powerloss.writer")
        os.close(its_input)
        its.close()

        try:
            await asyncio.to_thread(ours.recv, 1)  # it may be traced
            strace = await _attached(tracer, process.pid) if tracer else None

            with suppress(BrokenPipeError):  # it has ended; its exit code shows why
                os.write(our_end, f"{text}\n".encode())

            async with asyncio.timeout(limit):
                code = await asyncio.to_thread(process.wait)

                if strace is not None:
                    await strace.communicate()
        except TimeoutError:
            expected = f"an end of the writer within {limit:g} s"
            raise Failure(expected, "it still runs") from None
        finally:
            os.close(our_end)
            process.kill()
            process.wait()

        errors.seek(0)
        printed = errors.read().decode(errors="replace")

    if code:
        raise Failure("another process to use the store", printed[-4000:])


async def _attached(tracer: Sequence[str], pid: int) -> asyncio.subprocess.Process:
    """Let strace attach to a process; it ends with the process.

    To start Python under strace would take several times as long as the writer does.
    """
    strace = await asyncio.create_subprocess_exec(
        *(*tracer, "-p", str(pid)),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the process that reports
    )
    assert strace.stderr is not None

    while line := await strace.stderr.readline():
        if b" attached" in line:
            return strace

    await strace.wait()
    raise Skip(
        "not tested: this system does not allow ptrace; allow it, in Docker with "
        "--cap-add=SYS_PTRACE"
    )
