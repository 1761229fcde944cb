"""``drivers``, ``threads``, ``show``, ``calls``: what is stored, and nothing else."""

from __future__ import annotations

import errno
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cpkit.cli.output import age, one_line, plain, size
from cpkit.cli.stores import Store
from tests.cli.command import call, cpkit, environment, in_store, invoke, table

EVIL = "\x1b[31mred\x07 \x9b2J \u202e[bold]x[/bold] \x7f"
VERBS = """
    drivers doctor threads show tree calls pending approve deny copy export import prune
    certify bench
""".split()


async def fill(cp: Store) -> None:
    await cp.append("chat", [{"role": "user", "content": EVIL}])
    await cp.append("chat", [{"role": "assistant", "content": "hello"}, "text", 3])
    await cp.save_extra("chat", {"plan": ["a"], EVIL: EVIL})
    await call(cp, "chat", "c1", "k" * 64, success=False)
    await call(cp, "chat", "c2", "k" * 64, success=True)
    await call(cp, "chat", "c3", "other")
    await cp.append(f"evil {EVIL}", [{"n": 1}])
    await cp.append("long", [{"n": n} for n in range(30)])


def on_terminal(*words: str, columns: int = 60) -> str:
    """Run the command on a terminal of a width, and return what it was sent."""
    ours, theirs = pty.openpty()
    env = environment({"COLUMNS": str(columns), "TERM": "xterm"})
    process = subprocess.Popen(
        [sys.executable, "-m", "cpkit.cli", *words],
        stdout=theirs,
        stderr=theirs,
        env=env,
    )
    os.close(theirs)
    said = b""

    try:
        while block := os.read(ours, 65536):
            said += block
    except OSError as exc:
        if exc.errno != errno.EIO:  # Linux: the other side is closed
            raise
    finally:
        os.close(ours)
        process.wait(50)

    return said.decode()


def test_threads_are_listed(url: str) -> None:
    """Ordered by id, with how many messages each has; a page at a time."""
    in_store(url, fill)
    rows = table(cpkit("threads", url).out)
    assert [(row[0], row[1]) for row in rows] == [
        ("chat", "4"),
        (plain(f"evil {EVIL}"), "1"),
        ("long", "30"),
    ]
    first = invoke("threads", url, "--limit", "2", "--json").json
    assert [one["version"] for one in first["threads"]] == [4, 1]
    rest = invoke("threads", url, "--after", first["next"], "--json").json
    assert [one["thread_id"] for one in rest["threads"]] == ["long"]
    assert rest["next"] is None
    assert "--after" in invoke("threads", url, "--limit", "1").err
    assert [row[0] for row in table(invoke("threads", url, "--prefix", "l").out)] == [
        "long"
    ]
    assert (
        "no threads that start with 'x'" in invoke("threads", url, "--prefix", "x").err
    )


def test_a_thread_is_shown(url: str) -> None:
    """Its messages of any kind, extra and pending calls."""
    in_store(url, fill)
    shown = cpkit("show", url, "chat").out
    assert shown.startswith("chat: 4 messages\n")
    assert table(shown)[1] == ["1", "assistant", "hello"]
    assert "other" in shown
    found = invoke("show", url, "chat", "--json").json
    assert found["messages"][2:] == ["text", 3]
    assert found["extra"] == {"plan": ["a"], EVIL: EVIL}
    assert [one["call_id"] for one in found["pending"]] == ["c3"]

    last = invoke("show", url, "long", "--last", "2", "--json").json
    assert (last["first"], last["messages"]) == (28, [{"n": 28}, {"n": 29}])
    assert '{\n  "n": 29\n}' in invoke("show", url, "long", "--full", "--last", "1").out
    unknown = invoke("show", url, "nobody")
    assert (unknown.code, unknown.out) == (1, "")
    assert "there is no thread 'nobody'" in unknown.err


def test_calls_are_listed(url: str) -> None:
    """Each attempt in the order of claims, with failed ones and their receipts."""
    in_store(url, fill)
    rows = table(cpkit("calls", url, "chat").out)
    assert [(row[2], row[3]) for row in rows] == [
        ("failed", "1"),
        ("completed", "2"),
        ("issued", "1"),
    ]
    found = invoke("calls", url, "chat", "--json").json["calls"]
    assert [(one["call_id"], one["attempt"], one["result"]) for one in found] == [
        ("c1", 1, {"of": "c1"}),
        ("c2", 2, {"of": "c2"}),
        ("c3", 1, None),
    ]
    assert "c3" in invoke("calls", url, "chat", "--full").out
    assert invoke("calls", url, "nobody").code == 1


def test_drivers_are_listed() -> None:
    """Each scheme that can be opened, and what it is from."""
    rows = {row[0]: row for row in table(cpkit("drivers").out)}
    assert {"memory", "sqlite", "postgresql", "redis", "file"} <= set(rows)
    assert rows["sqlite"][-1] == "ready"
    found = invoke("drivers", "--json").json["drivers"]
    assert {"scheme", "driver", "package", "error"} == set(found[0])


@pytest.mark.parametrize(
    "words",
    [
        ["threads"],
        ["threads", "--json"],
        ["show", "chat"],
        ["show", "chat", "--full"],
        ["show", "chat", "--json"],
        ["export", "chat"],
    ],
)
def test_stored_text_steers_no_terminal(sqlite_url: str, words: list[str]) -> None:
    """On a terminal too, what is printed of it is printable, and markup is inert."""
    in_store(sqlite_url, fill)
    verb, *rest = words
    said = on_terminal(verb, sqlite_url, *rest, columns=200)

    for control in ("\x1b[31m", "\x07", "\x9b", "\u202e", "\x7f"):
        assert control not in said

    assert "[bold]x[/bold]" in said


def test_a_table_fits_a_narrow_terminal(sqlite_url: str) -> None:
    """Nothing is wider than it is, and ids are folded, not cut."""
    in_store(sqlite_url, fill)

    for words in (["threads"], ["calls", "chat"], ["show", "chat"]):
        for columns in (30, 50, 80):
            verb, *rest = words
            said = on_terminal(verb, sqlite_url, *rest, columns=columns)
            lines = said.replace("\r", "").split("\n")
            # What is bold is between two sequences that take no room.
            widths = [
                len(one.replace("\x1b[1m", "").replace("\x1b[0m", "")) for one in lines
            ]
            assert max(widths) <= columns, said
            assert "…" not in said


def test_colour_is_for_terminals(sqlite_url: str) -> None:
    """A pipe gets none, of answers and of errors."""
    in_store(sqlite_url, fill)
    assert "\x1b[" in on_terminal("show", sqlite_url, "chat")
    assert "\x1b[31m" in on_terminal("show", sqlite_url, "nobody")
    piped = cpkit("show", sqlite_url, "chat")
    assert "\x1b" not in piped.out + piped.err
    assert "\x1b" not in cpkit("show", sqlite_url, "nobody").err


@pytest.mark.parametrize("words", [["threads"], ["export"], ["show", "long"]])
def test_a_closed_pipe_is_no_error(sqlite_url: str, words: list[str]) -> None:
    """The reader has gone: nothing is said, and the code is that of SIGPIPE."""

    async def fill_much(cp: Store) -> None:
        await cp.append("long", [{"text": "x" * 1000}] * 200)

    in_store(sqlite_url, fill_much)
    verb, *rest = words
    reader, writer = os.pipe()
    os.close(reader)

    try:
        done = subprocess.run(
            [sys.executable, "-m", "cpkit.cli", verb, sqlite_url, *rest],
            stdout=writer,
            stderr=subprocess.PIPE,
            env=environment(),
            timeout=50,
            check=False,
        )
    finally:
        os.close(writer)

    assert (done.returncode, done.stderr) == (141, b"")


def test_the_url_may_stand_in_the_environment(sqlite_url: str) -> None:
    """CPKIT_URL serves wherever the URL is left out."""
    in_store(sqlite_url, fill)
    env = {"CPKIT_URL": sqlite_url}
    assert "chat" in cpkit("threads", env=env).out
    assert invoke("show", "chat", env=env).code == 0
    assert invoke("calls", "chat", env=env).code == 0
    assert invoke("pending", env=env).code == 0
    assert invoke("approve", "chat", "x", env=env).code == 1
    assert invoke("export", "chat", env=env).code == 0
    assert invoke("prune", "--older-than", "1d", "--dry-run", env=env).code == 0


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help_with_an_example(verb: str) -> None:
    """Which starts with the command itself, and names its options."""
    ended = invoke(verb, "--help")
    assert ended.code == 0
    assert f"  cpkit {verb}" in ended.out.partition("Example:")[2]


def test_the_command_alone_shows_its_verbs(tmp_path: Path) -> None:
    """And completion can be had for the shell."""
    ended = cpkit()
    assert ended.code == 0
    assert all(f"\n  {verb} " in ended.out for verb in VERBS)
    assert "_CPKIT_COMPLETE" in cpkit("--show-completion", "bash").out
    completed = cpkit(
        env={
            "_CPKIT_COMPLETE": "complete_bash",
            "COMP_WORDS": "cpkit pr",
            "COMP_CWORD": "1",
        }
    )
    assert completed.out.split() == ["prune"]
    assert cpkit("--version").out.startswith("cpkit ")


def test_words_for_people() -> None:
    """Small things that tables are made of."""
    from datetime import UTC, datetime, timedelta

    now = datetime.now(UTC)
    assert age(now - timedelta(days=3)) == "3 d"
    assert age(now - timedelta(minutes=5, seconds=2)) == "5 min"
    assert age(now + timedelta(minutes=5)) == "0 s"
    assert [size(n) for n in (999, 1000, 2_500_000)] == [
        "999 bytes",
        "1.0 kB",
        "2.5 MB",
    ]
    assert one_line({"a": "\n\x1b"}, 50) == '{"a": "\\n\\u001b"}'
    assert one_line("a\n  b" * 20, 5) == "a ba…"
    assert plain("\U000e0001") == "\\u{e0001}"
    nasty: Any = {"\U000e0001": "\x9b"}
    assert json.loads(json.dumps(nasty)) == nasty
