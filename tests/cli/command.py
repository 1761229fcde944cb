"""Run the command, in this process or in a new one, and fill stores for it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from typer.testing import CliRunner

from cpkit import ToolCall, open_checkpointer
from cpkit.cli import main
from cpkit.cli.app import app_for
from cpkit.cli.stores import Store
from tests.processes import ROOT, Forked

__all__ = [
    "Ended",
    "call",
    "cpkit",
    "environment",
    "forked",
    "in_store",
    "invoke",
    "run_main",
    "table",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Ended:
    """A command's exit code and output."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment, without URL, width and colour settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CPKIT_URL", "COLUMNS", "FORCE_COLOR", "NO_COLOR")
    }
    return {**kept, **(changes or {})}


def cpkit(*words: str, env: Mapping[str, str] | None = None) -> Ended:
    """Run the command in a new process."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "cpkit", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment(env),
        check=False,
    )
    assert "Traceback" not in done.stderr
    return Ended(done.returncode, done.stdout, done.stderr)


def forked(
    *words: str,
    module: str | Path = "cpkit",
    stdout: int = subprocess.PIPE,
    cwd: Path = ROOT,
) -> Ended:
    """Run the command in a forked process, which starts faster than a new one."""
    with Forked(module, *words, stdout=stdout, env=environment(), cwd=cwd) as process:
        out, err = process.communicate()
        return Ended(process.wait(), out, err)


def invoke(*words: str, env: Mapping[str, str | None] | None = None) -> Ended:
    """Run the command in this process, which is faster."""
    unset = {"CPKIT_URL": None, "COLUMNS": None}
    ended = CliRunner().invoke(
        app_for(words), list(words), env={**unset, **(env or {})}
    )

    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception

    return Ended(ended.exit_code, ended.stdout, ended.stderr)


def run_main(*words: str, encoding: str = "utf-8") -> Ended:
    """Run the command in this process from its entry point, usage errors included."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))

    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        patch.setattr("sys.argv", ["cpkit", *words])
        patch.delenv("CPKIT_URL", raising=False)

        with pytest.raises(SystemExit) as ended:
            main()

    for printed in (out, err):
        printed.seek(0)

    code = ended.value.code or 0  # None is success
    assert isinstance(code, int)
    return Ended(code, out.read(), err.read())


def in_store(url: str, work: Callable[[Store], Awaitable[T]]) -> T:
    """Open a store on a new event loop, and await work on it."""

    async def opened() -> T:
        async with open_checkpointer(url, message_type=Any) as cp:
            return await work(cp)

    return asyncio.run(opened())


async def call(
    cp: Store, thread_id: str, call_id: str, key: str, success: bool | None = None
) -> None:
    """Record a call, and its outcome unless ``success`` is ``None``."""
    issued = ToolCall(call_id, "charge", {"by": call_id}, key)
    assert await cp.record_issued(thread_id, issued) is None

    if success is not None:
        await cp.record_result(thread_id, call_id, {"of": call_id}, success=success)


def table(out: str) -> list[list[str]]:
    """Return the rows of a printed table, split at two or more spaces."""
    lines = [line.rstrip() for line in out.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("───"))
    return [
        [cell.strip() for cell in line.split("  ") if cell.strip()]
        for line in lines[start + 1 :]
    ]
