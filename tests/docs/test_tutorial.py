"""The tutorial's code runs, step by step, in the processes that it describes."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cpkit import open_checkpointer
from cpkit.effects import EffectLedger
from tests.cli.command import run_main
from tests.docs.pages import DOCS, blocks_of

PAGE = (DOCS / "tutorial.md").read_text(encoding="utf-8")
HELLO, WITH_TOOL, APPROVAL, CRASHING, RESUME = blocks_of("tutorial.md")
AGENTS = re.findall(r"^(?:CRASH=1 )?python agent\.py .*", PAGE, flags=re.MULTILINE)
URL = "sqlite:///trip.db"


def start(line: str) -> subprocess.Popen[str]:
    """Start a command line of the page in the current folder."""
    *settings, _, script, thread_id, question = shlex.split(line)
    return subprocess.Popen(
        [sys.executable, "-u", "-W", "error", script, thread_id, question],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **dict(one.split("=") for one in settings)},
    )


def printed(line: str, code: int = 0) -> str:
    """Run a command line of the page until it ends."""
    process = start(line)
    out, _ = process.communicate()
    assert process.returncode == code
    return out


def replaced(program: str, old: str, new: str) -> str:
    """Make the one change that the page asks for."""
    assert program.count(old) == 1
    return program.replace(old, new)


async def requested_key() -> str:
    """Return the key of the only request, which is stored before it is printed."""
    async with open_checkpointer(URL) as cp:
        [request] = await EffectLedger(cp).requests()
        return request.key


@pytest.mark.long
def test_each_step_does_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an empty folder to one booking, over a kill."""
    monkeypatch.chdir(tmp_path)
    script, airline = Path("agent.py"), Path("airline.txt")
    rome, tokyo, crash, oslo = AGENTS

    script.write_text(HELLO)
    for count in (1, 2):
        out = subprocess.check_output([sys.executable, "agent.py"], text=True)
        assert out == f"{count} times\n"
    assert run_main("show", URL, "hello").out.startswith("hello: 4 messages\n")

    script.write_text(WITH_TOOL)
    for _ in range(2):
        assert printed(rome) == "Done: HAT170 is booked\n"
        assert airline.read_text() == "HAT170 120\n"
    assert "completed" in run_main("calls", URL, "rome").out

    program = replaced(WITH_TOOL, "        ledger = EffectLedger(cp)\n", APPROVAL)
    script.write_text(program)
    agent = start(tokyo)
    assert agent.stdout is not None
    assert agent.stdout.readline().startswith("needs approval: {'flight': 'HAT88'")
    key = asyncio.run(requested_key())
    assert key[:12] in run_main("pending", URL).out
    approve = f"cpkit approve {URL} KEY --by anna"
    assert approve in PAGE
    assert run_main(*shlex.split(approve.replace("KEY", key[:12]))[1:]).code == 0
    out, _ = agent.communicate()
    assert (agent.returncode, out) == (0, "Done: HAT88 is booked\n")

    head = program[: program.index("\n\ndef model(")]
    program = replaced(program, head, CRASHING)
    script.write_text(program)
    assert printed(crash, -signal.SIGKILL) == ""
    assert airline.read_text().splitlines()[-1] == "HAT23 80"
    assert "oslo" in run_main("pending", URL).out

    [line] = re.findall(r"^ +tools = .*\n", program, flags=re.MULTILINE)
    script.write_text(replaced(program, line, line + RESUME))
    out = printed(oslo)
    assert "landed: book" in out
    assert out.endswith("Done: HAT23 is booked\n")
    assert airline.read_text().count("HAT23") == 1


def test_every_command_of_the_page_is_run() -> None:
    """A new command needs a step above."""
    commands = "".join(re.findall(r"```console\n(.*?)```", PAGE, flags=re.DOTALL))
    verbs = set(re.findall(r"^cpkit (\w+)", commands, flags=re.MULTILINE))
    assert verbs == {"show", "calls", "pending", "approve"}
    assert len(AGENTS) == 4
