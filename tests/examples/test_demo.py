"""The demo as a new user runs it: a process, killed workers, exit statuses."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from conformance.slowdown import slowdown
from cpkit import open_checkpointer
from cpkit.effects import EffectLedger
from tests.cli.command import Ended
from tests.processes import Forked
from tests.servers.postgres import shared_postgres
from tests.servers.redis import shared_redis
from tests.sweeps import sweep

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "agent.py"
BUNDLED = EXAMPLES / "data" / "conversations.jsonl"
READ_ONLY = ("get_", "search_", "list_", "calculate", "think")
QUICK = ("--pace", "0", "--conversations", "3", "--kills", "5", "--data", str(BUNDLED))

OTHERS = ["file", "postgresql", "redis"]

PATIENCE = 15.0 * slowdown()
"""Seconds for a process to start or end; normally it takes less than one."""

Booked = Counter[tuple[str, str]]
"""How often a tool was called with the same arguments."""


def start_demo(*options: str, script: Path = SCRIPT, folder: Path) -> Forked:
    env = os.environ | {"TMPDIR": str(folder)}
    return Forked(script, *options, env=env, cwd=folder)


def run_demo(*options: str, script: Path = SCRIPT, folder: Path) -> Ended:
    with start_demo(*options, script=script, folder=folder) as demo:
        out, err = demo.communicate()
        return Ended(demo.wait(), out, err)


def changes_recorded(count: int) -> Booked:
    """Return the recorded changes of the conversations that have the most changes."""
    found = []

    for line in BUNDLED.read_text().splitlines():
        calls = [
            call["function"]
            for message in json.loads(line)["messages"]
            for call in message.get("tool_calls") or []
        ]
        found.append(
            Counter(
                (call["name"], call["arguments"])
                for call in calls
                if not call["name"].startswith(READ_ONLY)
            )
        )

    found.sort(key=Counter.total, reverse=True)
    return sum(found[:count], Counter())


def changes_made(folder: Path) -> Booked:
    """Return the changes in the airline's books."""
    with closing(sqlite3.connect(folder / "airline-books.db")) as db:
        rows = db.execute("SELECT tool, args FROM books").fetchall()

    return Counter((tool, args) for tool, args in rows)


def url_of(store: str, folder: Path) -> str:
    match store:
        case "sqlite":
            return f"sqlite:///{folder}/agent.db"
        case "file":
            return f"file://{folder}/threads"
        case "postgresql":
            return shared_postgres(schema="demo")
        case _:
            return shared_redis(prefix="demo")


@pytest.mark.parametrize(
    "store",
    ["sqlite", *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)],
)
def test_killed_agent_resumes_and_books_once(store: str, tmp_path: Path) -> None:
    """On each kind of store, a killed and resumed agent makes each change once."""
    url = url_of(store, tmp_path)
    # After each kill a new Python starts.
    options = ("--folder", "run", *QUICK, "--kills", "2" if store == "sqlite" else "5")

    done = run_demo("--url", url, *options, folder=tmp_path)

    assert done.code == 0, done.out + done.err
    assert changes_made(tmp_path / "run") == changes_recorded(3)
    assert "kill -9   1  between an effect and its record" in done.out
    assert "equal to the byte" in done.out
    assert "no booking happened twice" in done.out
    assert "cpkit ui" in done.out.splitlines()[-1]
    assert not done.err
    assert asyncio.run(tools_to_decide(url)) == ["refund"]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("server", ["of the machine", "of the wheel"])
def test_killed_primary_books_once(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a Redis Cluster a primary is killed too; no server is left afterwards."""
    if server == "of the wheel":
        monkeypatch.setenv("PATH", "")

    done = run_demo("--cluster", "--folder", "run", *QUICK, folder=tmp_path)

    assert done.code == 0, done.out + done.err
    assert changes_made(tmp_path / "run") == changes_recorded(3)
    assert "the primary 127.0.0.1:" in done.out
    assert "no booking happened twice" in done.out
    ports = re.findall(r"127\.0\.0\.1:(\d+)", done.out.splitlines()[0])
    assert len(ports) == 6

    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port)))


async def tools_to_decide(url: str) -> list[str]:
    """Return the tools of the requests that wait for a person."""
    async with open_checkpointer(url) as cp:
        return [request.tool for request in await EffectLedger(cp).requests()]


@pytest.mark.long
def test_same_store_serves_a_second_run(tmp_path: Path) -> None:
    """Each run has its own threads."""
    options = ("--url", "sqlite:///agent.db", *QUICK)

    first = run_demo("--folder", "first", *options, folder=tmp_path)
    second = run_demo("--folder", "second", *options, folder=tmp_path)

    assert (first.code, second.code) == (0, 0), second.out
    assert changes_made(tmp_path / "second") == changes_recorded(3)


@pytest.mark.long
def test_without_the_record_of_calls_things_are_booked_twice(tmp_path: Path) -> None:
    """The demo can fail: it detects the double bookings that the ledger prevents."""
    done = run_demo("--no-ledger", "--folder", "run", *QUICK, folder=tmp_path)

    assert done.code == 1, done.out
    assert "Broken: the airline's books." in done.out
    assert changes_made(tmp_path / "run") > changes_recorded(3)


@pytest.mark.long
def test_bundled_conversations_are_the_default(
    tmp_path: Path,
) -> None:
    """A copy of the example plays its own data on a new store in a temporary folder."""
    copy = tmp_path / "somewhere" / "examples"
    shutil.copytree(
        EXAMPLES, copy, ignore=shutil.ignore_patterns("*_backend", "__pycache__")
    )
    here = tmp_path / "here"
    here.mkdir()

    done = run_demo(
        *("--pace", "0", "--kills", "4"), script=copy / "agent.py", folder=here
    )

    assert done.code == 0, done.out + done.err
    [folder] = here.iterdir()
    assert folder.name.startswith("cpkit-demo-")
    assert f"sqlite:///{folder}/agent.db" in done.out
    assert changes_made(folder) == changes_recorded(5)


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--url", "oracle://x"], 2, "no driver for 'oracle'"),
        (["--url", "memory://"], 2, "nothing in it can survive a kill"),
        pytest.param(
            ["--url", "memory://name"],
            2,
            "nothing in it can survive a kill",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["--url", "sqlite:///:memory:"],
            2,
            "nothing in it can survive a kill",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["--url", "sqlite:///%3Amemory:"],
            2,
            "nothing in it can survive a kill",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["--url", "sqlite:///a.db?speed=high"],
            2,
            "no option 'speed'",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["--data", "nowhere.jsonl"],
            2,
            "nowhere.jsonl: No such file",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["--data", "empty"],
            2,
            "no conversation has a call that changes something",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["--data", "prose"],
            2,
            "prose, line 1: not a recorded conversation",
            marks=pytest.mark.long,
        ),
        (
            ["--data", "unanswered"],
            2,
            "unanswered, line 1: not a recorded conversation",
        ),
        pytest.param(
            ["--data", "twice"],
            2,
            "two conversations have the name 'kestrel",
            marks=pytest.mark.long,
        ),
        (["--folder", "no-books"], 2, "the airline's books in no-books"),
        pytest.param(
            ["--url", "redis://:secret@127.0.0.1:1/0?connect_timeout=1"],
            3,
            ":1/0",
            marks=pytest.mark.long,
        ),
        (["--url", "postgresql://u:secret@127.0.0.1:1/x?connect_timeout=1"], 3, ":1/x"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_bad_use_is_one_line(
    options: list[str], status: int, words: str, tmp_path: Path
) -> None:
    """The error is one line, without a traceback and without a password."""
    first = BUNDLED.read_text().splitlines()[0]
    unanswered = json.loads(first)
    unanswered["messages"] = [m for m in unanswered["messages"] if m["role"] != "tool"]
    (tmp_path / "no-books" / "airline-books.db").mkdir(parents=True)
    (tmp_path / "empty").touch()
    (tmp_path / "prose").write_text("Dear airline,\n")
    (tmp_path / "twice").write_text(f"{first}\n{first}\n")
    (tmp_path / "unanswered").write_text(json.dumps(unanswered))

    done = run_demo(*options, folder=tmp_path)

    assert done.code == status, done.err
    assert done.err.startswith("agent.py: ")
    assert words in done.err
    assert done.err.count("\n") == 1
    assert "secret" not in done.err + done.out


@pytest.mark.parametrize(
    "option", sweep(["--kills", "--conversations", "--pace"], ["--kills"])
)
def test_wrong_numbers_are_refused(option: str, tmp_path: Path) -> None:
    """The error names the option and the smallest valid number."""
    done = run_demo(option, "-1", folder=tmp_path)

    assert done.code == 2
    assert f"argument {option}: must be at least" in done.err


def test_help_names_the_number_of_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number is that of the default file."""
    monkeypatch.setenv("COLUMNS", "1000")
    printed = run_demo("--help", folder=tmp_path).out
    file = re.search(r"object a line \(default: (.+)\)", printed)
    assert file is not None
    count = len(Path(file[1]).read_text().splitlines())
    assert f"(default: up to 8; the default file has {count})" in printed


@pytest.mark.long
def test_terminal_shows_bars_and_a_table(tmp_path: Path) -> None:
    """On a terminal the demo shows progress bars, and succeeds as without one."""
    ours, theirs = pty.openpty()

    with subprocess.Popen(
        [sys.executable, str(SCRIPT), "--folder", "run", *QUICK],
        cwd=tmp_path,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    ) as demo:
        os.close(theirs)
        seen = b""

        try:
            while chunk := os.read(ours, 65536):
                seen += chunk
        except OSError:  # Linux raises it when the other side of a terminal is closed
            os.close(ours)

    assert demo.returncode == 0, seen.decode()
    assert b"kestrel-two-at-once" in seen
    assert "━".encode() in seen
    assert b"no booking happened twice" in seen


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("how", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_ended_demo_leaves_no_worker(
    how: signal.Signals, status: int, tmp_path: Path
) -> None:
    """Ctrl-C and a kill of the demo also end its worker."""
    with start_demo(*QUICK, "--pace", "60", folder=tmp_path) as demo:
        wait_for(lambda: children_of(demo.pid))
        [worker] = children_of(demo.pid)
        # In the demo's call of `Popen`, Ctrl-C would leave a ResourceWarning.
        mapped = Path(f"/proc/{worker}/maps")
        wait_for(lambda: "agent.db-shm" in mapped.read_text())
        demo.send_signal(how)
        _, errors = demo.communicate()

    assert demo.returncode == status
    [folder] = tmp_path.iterdir()
    where = f"the store is sqlite:///{folder}/agent.db; books and log are in {folder}"
    said = f"agent.py: interrupted; {where}\n"
    assert errors == (said if how is signal.SIGINT else "")
    wait_for(lambda: not is_running(worker))


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_killed_demo_leaves_no_server(tmp_path: Path) -> None:
    """A kill of the demo also ends the servers of its cluster."""
    with start_demo("--cluster", *QUICK, folder=tmp_path) as demo:
        wait_for(lambda: any(tmp_path.rglob("airline-books.db")))
        children = children_of(demo.pid)
        assert len(children) >= 6

    wait_for(lambda: not any(map(is_running, children)))


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE

    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    found: list[int] = []

    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += map(int, task.read_text().split())

    return found


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False

    return stat.rpartition(")")[2].split()[0] != "Z"
