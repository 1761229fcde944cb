"""Errors are one line that says what to do, with an exit code."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.cli.command import environment, forked, in_store, invoke, run_main
from tests.cli.stocked import stock
from tests.processes import Forked
from tests.stores import SHARED, fresh_url
from tests.sweeps import sweep, table

READING = [
    "doctor {url}",
    "threads {url}",
    "show {url} t",
    "tree {url} t",
    "calls {url} t",
    "pending {url}",
    "approve {url} t k",
    "deny {url} t k",
    "heal {url} t",
    "copy {url} file:///tmp/cpkit-never-made",
    "export {url}",
    "prune {url} --older-than 1d --yes",
]


@pytest.mark.parametrize(("kind", "command"), table(SHARED, READING))
def test_a_wrong_url_creates_no_store(tmp_path: Path, kind: str, command: str) -> None:
    """The command reports that the store is missing, and exits with 3."""
    url = fresh_url(kind, tmp_path)

    for _ in range(2):
        ended = invoke(*(word.format(url=url) for word in command.split()))
        assert (ended.code, ended.out) == (3, "")
        assert "there is no store (nothing was created)" in ended.err
        assert ended.err.count("\n") == 1

    assert list(tmp_path.iterdir()) == []


def test_a_foreign_file_is_not_changed(tmp_path: Path) -> None:
    """A database, file or folder that is not a store keeps its content."""
    with sqlite3.connect(tmp_path / "app.db") as db:
        db.execute("CREATE TABLE mine (a)")

    db.close()
    (tmp_path / "empty.db").touch()
    (tmp_path / "text.db").write_text("This is not a database, but it is long enough.")
    (tmp_path / "folder").mkdir()

    for name, code in (("app.db", 3), ("empty.db", 3), ("text.db", 2)):
        before = (tmp_path / name).read_bytes()
        ended = invoke("threads", f"sqlite:///{tmp_path}/{name}")
        assert ended.code == code
        assert name in ended.err
        assert (tmp_path / name).read_bytes() == before

    assert invoke("threads", f"file://{tmp_path}/folder").code == 3
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["threads", "nope://x"], 2, "no driver for 'nope'"),
        (["threads", "agent.db"], 2, "write 'sqlite:///agent.db' for SQLite"),
        (["threads", "sqlite://agent.db"], 2, "three slashes"),
        (["threads", "sqlite:///x.db?colour=red"], 2, "no option 'colour'"),
        (["threads", "memory://"], 2, "lives in its own process"),
        (["ui", "memory://"], 2, "serve cpkit.ui.app(checkpointer"),
        (["ui", "sqlite:///:memory:"], 2, "serve cpkit.ui.app(checkpointer"),
        (["threads", "{url}", "--limit", "0"], 2, "--limit"),
        (["ui", "{url}", "--port", "99999"], 2, "65535"),
        (["ui", "{url}", "--host", "no.such.host"], 2, "cannot listen on"),
        (["ui", "{url}", "--host", ""], 2, "--host is empty"),
        (["ui", "{url}", "--allow-host", ""], 2, "'' is not a host"),
        (["ui", "{url}", "--allow-host", "http://a"], 2, "is not a host: write"),
        (["ui", "{url}", "--by", "an\udcffna"], 2, "'an\\udcffna', which is not text"),
        (["threads", "{url}", "--after", ""], 2, "after must not be empty"),
        (["show"], 2, "Missing argument"),
        (["show", "a", "b", "c"], 2, "expected [URL] THREAD, got 3 words"),
        (["show", "{url}"], 2, "[URL] THREAD: THREAD is missing after sqlite:"),
        (["tree", "{url}", "plain"], 2, "plain thread, not a session; print it: cpkit"),
        (["calls", "{url}", "no"], 1, "list all: cpkit threads {url}"),
        (["doctor", "{url}2"], 3, "create a store: cpkit doctor {url}2 --create"),
        (["approve", "{url}"], 2, "KEY is missing"),
        (["approve", "{url}", "k", "--args", "[" * 100_000], 2, "--args is not JSON"),
        (["worker", "{url}", "nowhere:run"], 2, "no module 'nowhere' here"),
        (["worker", "{url}", "json:nothing"], 2, "'json' has no 'nothing'"),
        (["worker", "{url}", "json"], 2, "write it as module:name"),
        (["worker", "{url}", ".agent:run"], 2, "write it as module:name"),
        (["worker", "{url}"], 2, "MODULE:AGENT is missing"),
        (["worker", "{url}", "m:a", "--health", "0"], 2, "--health must be positive"),
        (["worker", "{url}", "m:a", "--health", "nan"], 2, "--health must be positive"),
        (["recover", "{url}", "t", "json:loads"], 2, "not a list of tools"),
        (["recover", "{url}", "no", "json:decoder"], 1, "there is no thread 'no'"),
        (
            ["recover", "{url}", "pruned", "json:decoder", "--timeout", "nan"],
            2,
            "finite",
        ),
        (["shwo"], 2, "No such command 'shwo'"),
        (["threads", "--colour"], 2, "No such option"),
        (["prune", "", "--older-than", "0s", "--yes"], 2, "URL is empty"),
        (
            ["prune", "{url}", "--older-than", "0s", "--prefix", "", "--yes"],
            2,
            "--prefix is empty",
        ),
        (["prune", "{url}", "--older-than", "30"], 2, "not a duration"),
        (["prune", "{url}", "--older-than", "-1d"], 2, "not a duration"),
        (["prune", "{url}", "--older-than", "99999999w"], 2, "from 0 to 1000 years"),
        (["prune", "{url}", "--older-than", "0s"], 2, "--yes"),
        (["copy", "{url}", "{url}"], 2, "the same store"),
        (["copy", "nothing.jsonl", "{url}"], 2, "nothing.jsonl"),
        (["export", "{url}", "--output", "/nowhere/x"], 2, "/nowhere/x"),
        (["export", "{url}", "missing"], 1, "no thread 'missing'"),
        (
            ["threads", "redis://u:s3cret@127.0.0.1:1/0?connect_timeout=0.2"],
            3,
            "127.0.0.1', 1); is the server running?",
        ),
        (
            ["threads", "postgresql://u:s3cret@127.0.0.1:1/d?connect_timeout=1"],
            3,
            "127.0.0.1', 1); is the server running?",
        ),
        (["threads", "redis://u:s3c@ret@h#x/0"], 2, "%23"),
        (["threads", "redis://x", "redis://:s3cret@h"], 2, "(redis://:***@h)"),
        (["redis://:s3cret@h"], 2, "'redis://:***@h'"),
        (["recover", "t", "redis://:s3cret@h"], 2, "redis://:***@h"),
        (["import", "postgresql:/u:s3cret@h/d", "{url}"], 2, "postgresql:***@h/d"),
    ],
)
def test_bad_use(sqlite_url: str, words: list[str], code: int, said: str) -> None:
    """The error is one line on standard error, without the URL's password."""
    in_store(sqlite_url, stock)
    ended = run_main(*(word.format(url=sqlite_url) for word in words))
    assert (ended.code, ended.out) == (code, ""), ended.err
    assert said.format(url=sqlite_url) in ended.err
    assert ended.err.count("\n") == 1
    assert "s3c" not in ended.err


@pytest.mark.parametrize("kind", ["sqlite", "file"])
def test_a_newer_store_is_refused(tmp_path: Path, kind: str) -> None:
    """The error names both versions, and says to upgrade."""
    url = fresh_url(kind, tmp_path)
    in_store(url, stock)

    if kind == "sqlite":
        with sqlite3.connect(tmp_path / "store.db") as db:
            db.execute("UPDATE cpkit_schema SET version = 99")

        db.close()
    else:
        (tmp_path / "store" / "cpkit.json").write_text('{"cpkit":"file","version":99}')

    for words in (["threads", url], ["doctor", url], ["copy", url, "file:///tmp/no"]):
        ended = invoke(*words)
        assert ended.code == 2
        assert "99" in ended.err
        assert "upgrade cpkit" in ended.err


def test_a_folder_that_cannot_be_read_is_not_skipped() -> None:
    """An import that left out its conversations would not say so."""
    message = '{"role":"user","content":"hello"}\n'

    # Not tmp_path: another user cannot enter the folders around it.
    with TemporaryDirectory() as name:
        source, closed = Path(name), Path(name, "closed")
        closed.mkdir()
        (source / "talk.jsonl").write_text(message)
        (closed / "talk-2.jsonl").write_text(message)
        source.chmod(0o755)
        closed.chmod(0)
        words = ["import", name, "sqlite:////nowhere/store.db"]
        ended = forked(*words, module="tests.cli.unprivileged")
        closed.chmod(0o700)
        assert (ended.code, ended.out) == (2, ""), ended.err
        assert ended.err == f"{closed}: Permission denied\n"


@pytest.mark.parametrize("kind", sweep(["sqlite", "file"], ["sqlite"]))
def test_missing_permissions_are_reported(tmp_path: Path, kind: str) -> None:
    """The error names the store, or the file that cannot be written."""
    url = fresh_url(kind, tmp_path)
    in_store(url, stock)
    place = tmp_path / ("store.db" if kind == "sqlite" else "store")
    place.chmod(0)
    tmp_path.chmod(0o500)

    try:
        for words, code, said in (
            (["threads", url], 3, str(place)),
            (["export", url, "-o", str(tmp_path / "x.jsonl")], 2, "x.jsonl"),
        ):
            ended = forked(*words, module="tests.cli.unprivileged")
            assert (ended.code, ended.out) == (code, ""), ended.err
            assert said in ended.err
            assert ended.err.count("\n") == 1
    finally:
        tmp_path.chmod(0o700)
        place.chmod(0o700)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "{url}", "t"], ""),
        (
            ["copy", "{url}", "{url}2"],
            "interrupted: run the same command again; it copies the rest\n",
        ),
    ],
)
def test_ctrl_c_is_quiet(sqlite_url: str, words: list[str], said: str) -> None:
    """An interrupted command prints at most how to go on, and exits with 130."""
    in_store(sqlite_url, stock)
    words = [word.format(url=sqlite_url) for word in words]

    with Forked("tests.cli.interrupted", *words) as process:
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()

    assert (process.returncode, err) == (130, said)


def test_ctrl_c_is_quiet_while_modules_are_imported() -> None:
    """The first half second of a command is not its work yet."""
    program = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'cpkit.cli.app':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from cpkit.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_certify_without_its_packages_says_what_to_install(tmp_path: Path) -> None:
    """The error is one line with the pip command."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "sys.modules['hypothesis'] = None\n"
        "sys.argv = ['cpkit', 'certify', 'memory://']\n"
        "from cpkit.cli import main\n"
        "main()\n"
    )
    ended = forked(module=program)
    expected = "conformance needs hypothesis: pip install 'cpkit[conformance]'\n"
    assert (ended.code, ended.out, ended.err) == (2, "", expected)
