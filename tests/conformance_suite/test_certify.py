"""Certifying in code and on the command line: reports, files and exit codes."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

import pytest

from conformance import (
    Certification,
    Clause,
    Outcome,
    Report,
    Status,
    URLHarness,
    all_clauses,
    certify,
)
from cpkit import (
    BackendUnavailable,
    Durability,
    InvalidURL,
    MemoryCheckpointer,
    Survives,
)
from tests.cli.command import run_main

BROKEN = "tests.broken.erasing:AlwaysForgetsKeys"


async def test_certify_in_code() -> None:
    """certify() returns the report, and calls back before and after each clause."""
    started: list[Clause] = []
    ended: list[Outcome] = []
    report = await certify(
        "memory://certify",
        clauses=["append"],
        seed=3,
        on_start=started.append,
        on_outcome=ended.append,
    )
    assert report.ok
    assert report.seed == 3
    assert report.durability.startswith("none")
    assert report.limits is not None
    assert report.limits[:2] == (16 * 2**20, 64 * 2**20)
    assert ended == report.outcomes
    assert [outcome.clause for outcome in ended] == started
    assert {outcome.clause.subject for outcome in ended} == {"append"}


async def test_certify_refuses_unknown_targets_and_names() -> None:
    """Unknown targets and clauses are errors; a store that is down is unavailable."""
    with pytest.raises(InvalidURL):
        await certify("nope://x")

    with pytest.raises(ValueError, match=r"unknown clause 'append\.x'"):
        await certify("memory://", clauses=["append.x"])

    with pytest.raises(BackendUnavailable):
        await certify("redis://127.0.0.1:1/0?connect_timeout=1", clauses=["append"])


class Toy(MemoryCheckpointer[Any]):
    """States its durability as a sentence, where a mapping belongs."""

    @property
    def durability(self) -> Durability:
        return Durability(Survives.NONE, "a toy")  # type: ignore[arg-type]  # the point


async def test_a_wrong_durability_is_a_clear_error() -> None:
    """The run goes on; the certificate and the clause say what is wrong."""
    report = await certify(
        f"{__name__}:Toy", clauses=["handle.states-durability", "append.keeps-order"]
    )
    wrong = "TypeError: settings are a mapping, for instance"
    assert report.durability.startswith(f"not stated: {wrong}")
    (failed,) = report.failures
    assert failed.clause.id == "handle.states-durability"
    assert failed.seen.startswith(wrong)
    assert failed.seen.endswith("not 'a toy'; sentences are advice")


def command(folder: Path, *args: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "cpkit", "certify", *args],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_clauses_are_listed() -> None:
    """No store is opened; levels and clauses select as they do for a run."""
    found = run_main("certify", "--list", "--clause", "append.keeps-order")
    assert found.code == 0
    (line,) = found.out.splitlines()
    assert line.split(None, 2)[:2] == ["core", "append.keeps-order"]
    assert line.endswith(".")


@pytest.mark.long
def test_jobs_give_the_same_outcomes(tmp_path: Path) -> None:
    """A failure in another process has all its facts, and the order is the same."""
    options = ("--clause", "erase", "--clause", "append", "--seed", "4", "--json")
    alone, shared = (
        json.loads(command(tmp_path, BROKEN, *options, *jobs)[1])["clauses"]
        for jobs in ((), ("--jobs", "2"))
    )
    facts = ("id", "status", "expected")
    assert [[one.get(fact) for fact in facts] for one in shared] == [
        [one.get(fact) for fact in facts] for one in alone
    ]


class Unwritable(URLHarness):
    """A store whose every append fails, with another id in its message."""

    def __init__(self) -> None:
        super().__init__("memory://unwritable")

    def open(self, **options: Any) -> Any:
        checkpointer = MemoryCheckpointer[Any](**options)
        store: Any = checkpointer.store

        async def commit(batch: Any) -> Any:
            raise RuntimeError(f"row {id(batch)} is locked")

        store.commit = commit
        return checkpointer


def unwritable() -> Unwritable:
    return Unwritable()


def test_the_command_stops_and_counts_the_same_errors() -> None:
    """-x after the first failure, --maxfail after so many; an error is shown once."""
    target = f"{__name__}:unwritable"
    words = "certify", target, "--clause", "append"
    first = run_main(*words, "-x")
    assert first.code == 1
    assert first.out.count("fails append.") == 1
    found = run_main(*words, "--maxfail", "3")
    assert found.out.count("is locked") == 1
    assert found.out.count(": the same error as append.") == 2
    assert "same error  in 2 other clauses since append." in found.out


def test_a_store_of_one_process_runs_one_job() -> None:
    """Other processes would have stores of their own, or none; the command says it."""
    words = "certify", "memory://", "--clause", "append.keeps-order", "--jobs", "2"
    found = run_main(*words)
    assert found.code == 0
    assert "one job: only one process can open the store" in found.out


async def test_an_unfinished_run_reports_what_it_has() -> None:
    """The report is not ok, and says how many clauses were not run."""
    run = Certification("memory://unfinished", clauses=["append"])
    first = next(iter(run))
    report = run.report()
    assert report.outcomes == [first]
    assert report.unfinished == len(run.clauses) - 1
    assert not report.ok


@pytest.mark.long
def test_an_interrupted_command_prints_what_it_has(tmp_path: Path) -> None:
    """Outcomes are printed at once; Ctrl-C prints the table, exit code 130."""
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "cpkit", "certify", "sqlite:///x.db"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert "passed" in running.stdout.readline()
        running.send_signal(signal.SIGINT)
        rest = running.stdout.read()

    assert running.returncode == 130
    assert "clauses not run" in rest
    assert "core" in rest


def test_the_command_repeats_the_target_as_it_was_given() -> None:
    """On the terminal with its password; in files without."""
    clause = all_clauses()[0]
    failed = Outcome(clause, Status.FAILED, 0)
    url = "postgresql://me:s3cret@host/db"
    report = Report("postgresql://me@host/db", "", 1, 1, [failed], given=url)
    assert url in report.again(failed, as_given=True)
    assert "s3cret" not in report.to_json() + report.to_markdown() + report.to_junit()


def test_the_command_prints_a_certificate(tmp_path: Path) -> None:
    """For a correct store: a table, and exit code 0."""
    found = run_main("certify", f"sqlite:///{tmp_path}/x.db", "--clause", "append")
    assert found.code == 0
    assert "core" in found.out
    assert "holds" in found.out
    assert "machine: " in found.out


def test_the_command_explains_a_failure() -> None:
    """For a broken store: sentence, expected, seen, where, the command; exit code 1."""
    words = "certify", BROKEN, "--clause", "erase.completed-stays-paid", "--seed", "4"
    found = run_main(*words)
    assert found.code == 1
    assert "A completed call keeps its key" in found.out
    assert "expected  found == holder == _erased(done)" in found.out
    assert "found = None" in found.out
    assert "erase.py:" in found.out
    assert " ".join(("cpkit", *words)) in found.out


@pytest.mark.long
def test_the_command_writes_reports(tmp_path: Path) -> None:
    """JSON goes to standard output alone; XML and Markdown go to files."""
    code, out, _ = command(
        tmp_path,
        "memory://",
        *("--level", "core", "--clause", "append", "--clause", "extra"),
        *("--json", "--junit", "report.xml", "--markdown", "report.md"),
    )
    assert code == 0
    assert json.loads(out)["levels"]["core"]["verdict"] == "holds"
    assert xml.parse(tmp_path / "report.xml").getroot().tag == "testsuites"
    assert "| core | **holds** |" in (tmp_path / "report.md").read_text()


@pytest.mark.long
def test_the_printed_command_repeats_a_failure(tmp_path: Path) -> None:
    """The printed command checks only the failed clause, with the same seed."""
    first = command(tmp_path, BROKEN, "--clause", "erase", "--seed", "4", "--json")
    failed = [c for c in json.loads(first[1])["clauses"] if c["status"] == "failed"]
    words = shlex.split(failed[-1]["again"])
    code, out, _ = command(tmp_path, *words[2:], "--json")
    assert code == 1
    again = json.loads(out)
    assert again["seed"] == 4
    assert [c["id"] for c in again["clauses"]] == [failed[-1]["id"]]


def test_bad_use_of_the_command() -> None:
    """An unknown target, level or clause: a message, and exit code 2."""
    for args in (
        ["nope://x"],
        ["no.such.module:factory"],
        ["memory://", "--level", "perfect"],
        ["memory://", "--clause", "append.perfect"],
        ["memory://", "--colour", "red"],
        ["memory://", "--junit", "/nowhere/report.xml"],
        ["memory://", "--markdown", "/nowhere/report.md"],
        [],
    ):
        ended = run_main("certify", *args)
        assert (ended.code, ended.out) == (2, ""), args
        assert ended.err
        assert "Traceback" not in ended.err


@pytest.mark.long
def test_a_store_that_is_down(tmp_path: Path) -> None:
    """A store that cannot be opened: exit code 3, and no password in the output."""
    code, out, err = command(
        tmp_path, "redis://u:s3cret@127.0.0.1:1/0?connect_timeout=1"
    )
    assert code == 3
    assert "127.0.0.1" in err
    assert "s3cret" not in out + err


@pytest.mark.long
def test_a_store_that_hangs_does_not_hang_the_command(tmp_path: Path) -> None:
    """A clause that blocks its thread forever fails, and the command ends."""
    (tmp_path / "stuck.py").write_text(
        "import threading\n"
        "from cpkit import MemoryCheckpointer\n"
        "class Stuck(MemoryCheckpointer):\n"
        "    async def append(self, *args, **options):\n"
        "        threading.Event().wait()\n"
    )
    (tmp_path / "short.py").write_text(
        "from dataclasses import replace\n"
        "from conformance import clause\n"
        "from conformance.clause import REGISTERED\n"
        "from stuck import Stuck\n"
        "short = replace(REGISTERED['append.keeps-order'], deadline=0.2)\n"
        "REGISTERED['append.keeps-order'] = short\n"
    )
    code, out, _ = command(tmp_path, "short:Stuck", "--clause", "append.keeps-order")
    assert code == 1
    assert "a thread that still runs" in out


def test_the_command_says_what_failovers_lost() -> None:
    """An engine that may lose writes passes, and its certificate counts them.

    Whether a failover finds a write on its way is luck: the next run may.
    """
    target = "tests.broken.replicas:lossy"
    words = "certify", target, "--clause", "replicated.leader-killed", "--rounds"

    for rounds in ("0.5", "1", "2", "4"):
        ended = run_main(*words, rounds)
        assert ended.code == 0
        ((lost, all_),) = re.findall(r"lost (\d+) of (\d+) acknowledged", ended.out)

        if int(lost):
            break

    assert 0 < int(lost) < int(all_)
