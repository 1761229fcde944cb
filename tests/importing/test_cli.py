"""The command ``cpkit import``, and its page."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cpkit import open_checkpointer
from cpkit.cli.app import app_for
from cpkit.tools import importing
from tests.importing.test_sources import BYE, HELLO, HI, written
from tests.processes import Forked


@pytest.fixture
def lines(tmp_path: Path) -> str:
    """A file with three conversations, one of them damaged."""
    return str(
        written(
            tmp_path / "talks.jsonl",
            {"id": "a", "messages": [HELLO, HI, BYE]},
            {"id": "b", "messages": [HELLO], "note": "n"},
            {"id": "c", "messages": [{"no": "role"}]},
        )
    )


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/agent.db"


def run(*arguments: str) -> Result:
    """Run ``cpkit import`` in this process."""
    words = ["import", *arguments]
    return CliRunner().invoke(app_for(words), words, env={"COLUMNS": "80"})


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start ``cpkit import`` in a new process."""
    return subprocess.Popen([sys.executable, "-m", "cpkit", "import", *arguments])


def row(output: str, label: str) -> list[str]:
    """Return the numbers of a table's row."""
    (found,) = [line for line in output.splitlines() if line.startswith(label + " ")]
    return found.removeprefix(label).split()


def test_the_output_counts_conversations_by_outcome(lines: str, url: str) -> None:
    """The exit code is 1 if one was left, also in a repeated import."""
    done = run(lines, url)
    assert done.exit_code == 1
    assert row(done.stdout, "read") == ["3", "4"]
    assert row(done.stdout, "written") == ["2", "4"]
    assert row(done.stdout, "left") == ["1"]
    assert "left: 1 × a message without a role (talks.jsonl, line 3)" in done.stdout
    assert "left: 1 × field 'note' is not a message" in done.stdout
    again = run(lines, url)
    assert row(again.stdout, "written") == ["0", "0"]
    assert row(again.stdout, "there before") == ["2"]
    assert "\x1b" not in again.output
    assert done.stderr == again.stderr == ""


def test_a_dry_run_writes_nothing(tmp_path: Path, lines: str, url: str) -> None:
    """It counts what would be written, and creates no store."""
    dry = run(lines, url, "--dry-run")
    assert dry.exit_code == 1
    assert row(dry.stdout, "would be written") == ["2", "4"]
    assert [path.name for path in tmp_path.iterdir()] == ["talks.jsonl"]

    async def extend() -> Any:
        async with open_checkpointer(url) as cp:
            await cp.append("a", [HELLO])

    asyncio.run(extend())
    dry = run(lines, url, "--dry-run")
    assert row(dry.stdout, "would be written") == ["2", "3"]


def test_json_has_every_conversation(lines: str, url: str) -> None:
    """The standard output is one JSON object."""
    report = json.loads(run(lines, url, "--json").stdout)
    assert report["written"] == {"threads": 2, "messages": 4}
    assert report["left"]["reasons"] == {
        "field 'note' is not a message": 1,
        "a message without a role": 1,
    }
    assert [t["status"] for t in report["threads"]] == ["new", "new", "left"]
    assert report["threads"][0] == {
        "name": "talks.jsonl, line 1",
        "thread_id": "a",
        "status": "new",
        "read": 3,
        "written": 3,
        "reason": None,
    }


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["nothing.jsonl", "{url}"], 2, "nothing.jsonl: no such file or folder"),
        (["{lines}", "{url}", "--kind", "csv"], 2, "unknown kind 'csv'"),
        (["{lines}", "nosuch://"], 2, "no driver for 'nosuch'"),
        (["redis://localhost", "{url}"], 2, "'cpkit copy'"),
        (["{lines}", "memory://"], 2, "lives in its own process"),
        (["{lines}", "{url}", "--kind", "openai-agents"], 2, "not a database"),
        (["postgresql://u:pw@127.0.0.1:1/d", "{url}"], 2, "u:***@127.0.0.1:1"),
        (["{lines}", "sqlite:////dev/null/agent.db"], 3, "/dev/null/agent.db"),
    ],
)
def test_an_error_is_one_line(
    lines: str, url: str, arguments: list[str], code: int, sentence: str
) -> None:
    """It is on standard error, without a traceback."""
    done = run(*(argument.format(lines=lines, url=url) for argument in arguments))
    assert done.exit_code == code
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert sentence in done.stderr


def test_a_bad_source_creates_no_store(tmp_path: Path, url: str) -> None:
    """The source is checked before the store is opened."""
    assert run("nothing.jsonl", url).exit_code == 2
    assert run(str(tmp_path), url).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_control_characters_are_escaped(tmp_path: Path, url: str) -> None:
    """Text of the source cannot control the terminal."""
    path = written(tmp_path / "t.jsonl", {"messages": [HELLO], "\x1b[31m\u202e": 1})
    done = run(str(path), url)
    assert done.exit_code == 0
    assert "\x1b" not in done.output
    assert "\u202e" not in done.output


def test_help_has_an_example() -> None:
    """It also names every kind."""
    done = run("--help")
    assert "cpkit import checkpoints.sqlite" in done.stdout
    text = " ".join(done.stdout.split())
    assert all(kind in text for kind in importing.KINDS)


async def test_the_next_import_completes_a_killed_one(tmp_path: Path, url: str) -> None:
    """Every conversation is complete, and no message is there twice."""
    talks = [{"id": f"{n:02}", "messages": [HELLO, HI, BYE]} for n in range(20)]
    path = written(tmp_path / "talks.jsonl", *talks)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    with Forked("cpkit", "import", str(pipe), url, "--kind", "transcripts") as killed:
        # A pipe, so that the import cannot end before it is killed.
        with await asyncio.to_thread(pipe.open, "w") as feed:
            for talk in talks[:7]:
                feed.write(json.dumps(talk) + "\n")

            feed.flush()

            async with open_checkpointer(url) as cp:
                while await cp.load("06") is None:  # noqa: ASYNC110  # of another process
                    await asyncio.sleep(0.01)

            killed.kill()
            killed.wait()

    done = await asyncio.to_thread(run, str(path), url)
    assert done.exit_code == 0
    assert row(done.stdout, "written") == ["13", "39"]
    assert row(done.stdout, "there before") == ["7"]

    async with open_checkpointer(url) as cp:
        for talk in talks:
            data = await cp.load(str(talk["id"]))
            assert data is not None
            assert data.messages == talk["messages"]


async def test_ctrl_c_does_not_wait_for_the_source(tmp_path: Path, url: str) -> None:
    """A pipe whose writer says nothing more; what was read is imported."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = start(str(pipe), url, "--kind", "transcripts")

    try:
        with await asyncio.to_thread(pipe.open, "w") as feed:
            feed.write(json.dumps({"id": "a", "messages": [HELLO]}) + "\n")
            feed.flush()

            async with open_checkpointer(url) as cp:
                while await cp.load("a") is None:  # noqa: ASYNC110  # of another process
                    await asyncio.sleep(0.01)

            process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(process.wait) != 0
    finally:
        process.kill()
        process.wait()


def test_public_names_exist() -> None:
    """__all__ lists only names of the package."""
    assert all(hasattr(importing, name) for name in importing.__all__)
