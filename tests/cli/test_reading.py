"""``drivers``, ``threads``, ``show``, ``calls``: print what a store has, safely."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import subprocess
import sys
from contextlib import redirect_stdout
from typing import Any

import pytest

from cpkit import ToolCall
from cpkit.cli import app
from cpkit.cli.help import GROUPS
from cpkit.cli.output import one_line, print_table, printable
from cpkit.cli.stores import Store
from cpkit.effects import Effect, EffectLedger
from cpkit.sessions import SessionLog
from cpkit.tools.formats import age, size
from tests.cli.command import (
    call,
    cpkit,
    environment,
    forked,
    in_store,
    invoke,
    run_main,
    table,
)
from tests.cli.stocked import CUT, stock_cut
from tests.processes import Forked
from tests.sweeps import sweep

EVIL = "\x1b[31mred\x07 \x9b2J \u202e[bold]x[/bold] \x7f"
COMMANDS = """
    drivers doctor threads show tree calls watch pending approve deny recover worker
    heal copy export import prune erase keyring rewrap new-backend certify bench
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


def on_terminal(*words: str, columns: int = 60, **env_changes: str) -> str:
    """Run the command on a terminal of this width, and return its output."""
    ours, theirs = pty.openpty()
    env = environment({"COLUMNS": str(columns), "TERM": "xterm", **env_changes})
    said = b""

    with Forked("cpkit", *words, stdout=theirs, stderr=theirs, env=env):
        os.close(theirs)

        try:
            while block := os.read(ours, 65536):
                said += block
        except OSError as exc:
            if exc.errno != errno.EIO:  # Linux raises EIO when the other side is closed
                raise
        finally:
            os.close(ours)

    return said.decode()


def test_threads_are_listed(url: str) -> None:
    """The list is ordered by id, has the number of messages, and comes in pages."""
    in_store(url, fill)
    rows = table(invoke("threads", url).out)
    assert [(row[0], row[1]) for row in rows] == [
        ("chat", "4"),
        (printable(f"evil {EVIL}"), "1"),
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


def test_threads_are_searched(url: str) -> None:
    """By the engine; a store that cannot says so, and pages are not for a search."""
    in_store(url, fill)
    ended = run_main("threads", url, "--search", 'a "needle"')

    if url.startswith("file"):
        assert ended.code == 2
        assert "cannot search messages" in ended.err
        return

    assert "no threads with 'a \"needle\"' in a message" in ended.err

    async def say(cp: Any) -> None:
        await cp.append("z", [{"text": 'a "needle"'}])
        await cp.append("chat", [{"text": 'A "Needle"'}])
        await cp.append("cpkit:own", [{"text": 'a "needle"'}])

    in_store(url, say)
    found = run_main("threads", url, "--search", 'a "needle"', "--json").json
    assert [one["thread_id"] for one in found["threads"]] == ["chat", "z"]
    ended = run_main("threads", url, "--search", "needle", "--limit", "1")
    assert "there are more: cpkit threads" in ended.err
    assert "--search needle --limit 10" in ended.err
    assert run_main("threads", url, "--search", "x", "--after", "a").code == 2


def test_an_empty_list_says_how_to_see_threads_of_adapters(sqlite_url: str) -> None:
    """A store that an adapter alone has written looks empty without that option."""
    in_store(sqlite_url, lambda cp: cp.append("cpkit:langgraph:t", [{}]))
    ended = invoke("threads", sqlite_url)
    assert (ended.code, ended.err.count("\n")) == (0, 1)
    assert ended.err.endswith(f"cpkit threads {sqlite_url} --internal\n")
    assert "cpkit:langgraph:t" in invoke("threads", sqlite_url, "--internal").out


@pytest.mark.parametrize("last", ["1", "zoo"])
def test_internal_threads_are_listed_on_request(sqlite_url: str, last: str) -> None:
    """Leases and the like are not work for a person."""
    internal = [f"cpkit:lease:{n}" for n in range(3)]

    async def fill_internal(cp: Store) -> None:
        for thread_id in [*internal, last, "cpkit"]:
            await call(cp, thread_id, "c", f"key of {thread_id}")

    in_store(sqlite_url, fill_internal)
    shown = sorted([last, "cpkit"])

    def listed(*options: str) -> list[str]:
        found = run_main("threads", sqlite_url, "--json", *options).json
        return [one["thread_id"] for one in found["threads"]]

    assert listed() == shown
    assert listed("--limit", "1") == shown[:1]
    assert listed("--internal") == sorted([*internal, *shown])
    assert listed("--prefix", "cpkit:l") == internal

    for options, count in (([], 2), (["--internal"], 5)):
        found = run_main("pending", sqlite_url, "--json", *options).json["pending"]
        assert len(found) == count

    found = run_main("doctor", sqlite_url, "--json").json
    assert (found["threads"], found["oldest_pending"]["thread_id"]) == (2, last)
    hint = run_main("threads", sqlite_url, "--limit", "1", "--prefix", last[0]).err
    assert hint == ""
    hint = run_main("threads", sqlite_url, "--limit", "1").err
    assert f"cpkit threads {sqlite_url} --after {shown[0]} --limit 1\n" in hint


def test_a_thread_is_shown(url: str) -> None:
    """The output has messages of any JSON type, extra and pending calls."""
    in_store(url, fill)
    shown = invoke("show", url, "chat").out
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
    unknown = invoke("show", url, "missing")
    assert (unknown.code, unknown.out) == (1, "")
    assert "there is no thread 'missing'" in unknown.err


def test_calls_are_listed(url: str) -> None:
    """The list has every attempt in the order of claims, also failed ones."""
    in_store(url, fill)
    rows = table(invoke("calls", url, "chat").out)
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
    assert invoke("calls", url, "missing").code == 1


def test_an_effect_is_listed_by_its_arguments(sqlite_url: str) -> None:
    """Not by what the ledger keeps beside them; JSON has all of it."""

    async def send(effect: Effect) -> str:
        return "sent"

    async def fill_in(cp: Any) -> None:
        await EffectLedger(cp).run("t", "send", {"to": "ann"}, send)
        await EffectLedger(cp).begin("t", "send", {"to": "bob"})

    in_store(sqlite_url, fill_in)
    rows = table(invoke("calls", sqlite_url, "t").out)
    assert [row[-2:] for row in rows][0] == ['{"to": "ann"}', "sent"]
    assert '{"to": "bob"}' in invoke("pending", sqlite_url).out
    found = invoke("calls", sqlite_url, "t", "--json").json["calls"]
    assert found[0]["args"]["stale_after"] > 0
    assert found[0]["result"] == {"value": "sent"}


def test_drivers_are_listed() -> None:
    """The list has every scheme, its driver, its package and its state."""
    rows = {row[0]: row for row in table(run_main("drivers").out)}
    assert {"memory", "sqlite", "postgresql", "redis", "file"} <= set(rows)
    assert rows["sqlite"][-1] == "ready"
    found = invoke("drivers", "--json").json["drivers"]
    assert {"scheme", "driver", "package", "error"} == set(found[0])


@pytest.mark.parametrize(
    "words",
    sweep(
        [
            ["threads"],
            ["threads", "--json"],
            ["show", "chat"],
            ["show", "chat", "--full"],
            ["show", "chat", "--json"],
            ["export", "chat"],
        ],
        [["show", "chat"], ["show", "chat", "--full"], ["export", "chat"]],
    ),
)
def test_stored_text_cannot_control_a_terminal(
    sqlite_url: str, words: list[str]
) -> None:
    """On a terminal, stored text is escaped and its markup is not interpreted."""
    in_store(sqlite_url, fill)
    verb, *rest = words
    said = on_terminal(verb, sqlite_url, *rest, columns=200)

    for control in ("\x1b[31m", "\x07", "\x9b", "\u202e", "\x7f"):
        assert control not in said

    assert "[bold]x[/bold]" in said


@pytest.mark.long
def test_a_table_fits_a_narrow_terminal(sqlite_url: str) -> None:
    """No line is wider than the terminal, and ids are folded, not truncated."""
    in_store(sqlite_url, fill)

    for columns, verb, *rest in (
        (30, "threads"),
        (50, "calls", "chat"),
        (80, "show", "chat"),
    ):
        said = on_terminal(verb, sqlite_url, *rest, columns=columns)
        lines = said.replace("\r", "").split("\n")
        # The escape sequences around bold text have no width.
        widths = [
            len(one.replace("\x1b[1m", "").replace("\x1b[0m", "")) for one in lines
        ]
        assert max(widths) <= columns, said
        assert "…" not in said


@pytest.mark.parametrize("columns", sweep([80, 60, 30], [80, 30]))
def test_pending_keeps_ids_and_keys_whole(sqlite_url: str, columns: int) -> None:
    """A person copies them. The other cells wrap, or each field has its own line."""
    thread, key = "customer-4711-of-2026", "invoice:2026-11:4711"
    args = {"to": "ann", "words": "a reason that is long enough to be wrapped"}

    async def make(cp: Store) -> None:
        await cp.record_issued(thread, ToolCall("c", "wire", args, key))

    in_store(sqlite_url, make)
    said = on_terminal("pending", sqlite_url, columns=columns).replace("\r", "")
    assert thread in said
    assert key in said
    assert "ann" in said

    if columns == 80:
        _, _, said = said.rpartition("\x1b[2K")  # behind the progress bar
        said = said.replace("\x1b[1m", "").replace("\x1b[0m", "")
        assert max(map(len, said.splitlines())) <= columns


def test_a_table_keeps_its_columns_apart() -> None:
    """Wide characters take two columns, lines end without spaces, numbers are right."""
    rows = [["日本語", "one two three", 5], ["é", "", 12]]
    out = io.StringIO()

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.setenv("COLUMNS", "20")
        print_table(["id", "said", "n"], rows, right="n")

    assert out.getvalue().split("\n") == [
        "id      said       n",
        "────────────────────",
        "日本語  one two    5",
        "        three",
        "é                 12",
        "",
    ]


@pytest.mark.long
def test_only_a_terminal_gets_colours(sqlite_url: str) -> None:
    """Output and errors in a pipe have no colours."""
    in_store(sqlite_url, fill)
    assert "\x1b[" in on_terminal("show", sqlite_url, "chat")
    assert "\x1b[31m" in on_terminal("show", sqlite_url, "missing")
    assert "\x1b" not in on_terminal("show", sqlite_url, "missing", NO_COLOR="1")
    assert "\x1b" not in on_terminal("show", sqlite_url, "missing", TERM="dumb")
    piped = run_main("show", sqlite_url, "chat")
    assert "\x1b" not in piped.out + piped.err
    assert "\x1b" not in run_main("show", sqlite_url, "missing").err


def test_a_table_has_a_least_width() -> None:
    """On a terminal of a few columns its cells are not single characters."""
    out = io.StringIO()

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.setenv("COLUMNS", "5")
        print_table(["id", "said"], [["abcd", "efgh"]])

    assert out.getvalue().split("\n")[2] == "abcd  efgh"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "words",
    sweep(
        [["threads"], ["show", "chat"], ["threads", "--json"], ["export"]],
        [["threads"], ["threads", "--json"], ["export"]],
    ),
)
def test_a_full_disk_is_reported(sqlite_url: str, words: list[str]) -> None:
    """The error of the output is one line, and the exit code is 2."""
    in_store(sqlite_url, fill)
    verb, *rest = words

    with open("/dev/full", "wb") as full:
        ended = forked(verb, sqlite_url, *rest, stdout=full.fileno())

    assert ended.code == 2
    assert ended.err == "standard output: No space left on device\n"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["threads"], 0),
        pytest.param(["prune", "--older-than", "0s"], 2, marks=pytest.mark.long),
    ],
)
def test_closed_streams_are_the_null_device(
    sqlite_url: str, words: list[str], code: int
) -> None:
    """The command runs, and no file of the store gets the number of a stream."""
    in_store(sqlite_url, fill)
    verb, *rest = words
    command = [sys.executable, "-m", "cpkit", verb, sqlite_url, *rest]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&-', "sh", *command],
        stderr=subprocess.PIPE,
        env=environment(),
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words", sweep([["threads"], ["export"], ["show", "long"]], [["threads"]])
)
def test_a_closed_pipe_is_quiet(sqlite_url: str, words: list[str]) -> None:
    """The command prints nothing, and exits with the code of SIGPIPE."""

    async def fill_much(cp: Store) -> None:
        await cp.append("long", [{"text": "x" * 1000}] * 200)

    in_store(sqlite_url, fill_much)
    verb, *rest = words
    reader, writer = os.pipe()
    os.close(reader)

    try:
        done = subprocess.run(
            [sys.executable, "-m", "cpkit", verb, sqlite_url, *rest],
            stdout=writer,
            stderr=subprocess.PIPE,
            env=environment(),
            check=False,
        )
    finally:
        os.close(writer)

    assert (done.returncode, done.stderr) == (141, b"")


def test_the_environment_can_name_the_url(sqlite_url: str) -> None:
    """A command without a URL uses CPKIT_URL."""
    in_store(sqlite_url, fill)
    env = {"CPKIT_URL": sqlite_url}
    assert "chat" in cpkit("threads", env=env).out
    assert invoke("show", "chat", env=env).code == 0
    assert invoke("calls", "chat", env=env).code == 0
    assert invoke("pending", env=env).code == 0
    assert invoke("approve", "chat", "x", env=env).code == 1
    assert invoke("export", "chat", env=env).code == 0
    assert invoke("prune", "--older-than", "1d", "--dry-run", env=env).code == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_an_example(command: str) -> None:
    """The example runs the command."""
    ended = invoke(command, "--help")
    assert ended.code == 0
    assert f"  cpkit {command}" in ended.out.partition("Example:")[2]
    assert not re.search(r"<(list|int|str|float|path)", ended.out)


def test_cpkit_alone_lists_its_commands_in_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each command has a whole sentence. There are shell completion and a version."""
    ended = run_main()
    assert ended.code == 0
    assert all(f"\n  {command} " in ended.out for command in COMMANDS)
    assert all(f"\n{group}:\n" in ended.out for group in GROUPS)
    assert "Other:" not in ended.out
    assert "..." not in ended.out.partition(next(iter(GROUPS)))[2]
    assert run_main("--version").out.startswith("cpkit ")
    monkeypatch.setenv("_CPKIT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "cpkit pr")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert run_main().out.split() == ["prune"]


def test_a_command_imports_only_what_it_needs() -> None:
    """Importing all commands takes longer than most commands do."""
    program = (
        "import sys\n"
        "from cpkit.cli import main\n"
        "for word in ('--version', 'threads'):\n"
        "    sys.argv = ['cpkit', word, 'memory://']\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit:\n"
        "        print(*sys.modules)\n"
    )
    out = subprocess.check_output([sys.executable, "-c", program], text=True)
    version, loaded_first, loaded = out.splitlines()
    assert version.startswith("cpkit ")
    assert "cpkit.cli.app" in loaded_first.split()
    others = {f"cpkit.cli.{module}" for module, _ in app.COMMANDS.values()}
    others |= {"conformance", "cpkit.effects", "cpkit.heal", "opentelemetry"}
    assert others.isdisjoint(loaded_first.split())
    assert others & set(loaded.split()) == {"cpkit.cli.threads"}


def test_values_are_formatted_for_people() -> None:
    """Ages, sizes and long values have a short form."""
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
    assert printable("\U000e0001") == "\\u{e0001}"
    nasty: Any = {"\U000e0001": "\x9b"}
    assert json.loads(json.dumps(nasty)) == nasty


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_half_a_character_is_printed(sqlite_url: str, encoding: str) -> None:
    """As an escape for people, and as JSON that any tool reads."""

    async def fill_cut(cp: Any) -> None:
        await stock_cut(cp, "t")
        log = await SessionLog.open(cp, "s")
        await log.append_message({"role": "user", "content": CUT[0]})
        await log.set_name("\udfff")

    in_store(sqlite_url, fill_cut)

    for command, thread, *options in (
        ("show", "t"),
        ("show", "t", "--full"),
        ("show", "t", "--json"),
        ("calls", "t"),
        ("calls", "t", "--json"),
        ("tree", "s"),
        ("tree", "s", "--svg"),
        ("tree", "s", "--mermaid"),
        ("tree", "s", "--json"),
        ("heal", "t", "--json"),
    ):
        words = (command, sqlite_url, thread, *options)
        ended = run_main(*words, encoding=encoding)
        assert (ended.code, ended.err, words) == (0, "", words)

        if "--json" in options:
            assert ended.json

    shown = invoke("show", sqlite_url, "t", "--json").json
    assert [one["content"] for one in shown["messages"]] == [CUT[0], "😀", *CUT[2:]]
    assert r"cut \u{d83d}" in invoke("show", sqlite_url, "t").out

    lines = on_terminal("export", sqlite_url, "t").splitlines()
    message = next(json.loads(line) for line in lines if line.startswith('{"mess'))
    assert message == {"message": {"role": "user", "content": CUT[0]}}
