"""The report: verdicts, and the same facts as JSON, Markdown and JUnit XML."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from xml.etree import ElementTree as xml

import pytest

from conformance import SUITE_VERSION, Clause, Level, Outcome, Report, Status
from conformance.case import Case
from cpkit.driver import Limits


async def check(case: Case) -> None:
    """Do nothing: the outcomes are made by hand."""


def outcome(clause_id: str, status: Status, level: Level = Level.CORE) -> Outcome:
    clause = Clause(clause_id, f"{clause_id} | holds.", level, (), 5, check)
    reason = "" if status in (Status.PASSED, Status.FAILED) else "no server"
    failed = status is Status.FAILED
    return Outcome(
        clause,
        status,
        0.25,
        reason,
        "x == 1" if failed else "",
        "x = '\0```'" if failed else "",
        "clause.py:7\nin check" if failed else "",
        "Traceback \x1b" if failed else "",
    )


PASSED = outcome("a.holds", Status.PASSED)
FAILED = outcome("a.fails", Status.FAILED)
SKIPPED = outcome("d.skips", Status.SKIPPED, Level.DURABLE)
UNSUPPORTED = outcome("o.lacks", Status.UNSUPPORTED, Level.OPTIONAL)


def report(*outcomes: Outcome, asked: tuple[str, ...] = ()) -> Report:
    return Report("memory://x y", "none: words", 7, 2.0, [*outcomes], asked)


def test_unsupported_is_not_failed() -> None:
    """A clause that is unsupported or skipped does not fail a store."""
    assert report(PASSED, SKIPPED, UNSUPPORTED).ok
    assert not report(PASSED, FAILED).ok


def test_a_named_level_must_hold() -> None:
    """A named level without a passed clause is not ok."""
    assert report(PASSED, asked=("core",)).ok
    assert not report(PASSED, SKIPPED, asked=("core", "durable")).ok


def test_a_verdict_for_each_level() -> None:
    """A level holds when a clause of it passed and none failed."""
    found = report(PASSED, FAILED, SKIPPED, UNSUPPORTED)
    assert found.verdict("core") == "fails"
    assert found.verdict("durable") == found.verdict("optional") == "not asked"
    assert report(PASSED).verdict("core") == "holds"


def test_a_failure_has_a_command_that_repeats_it() -> None:
    """The command is one line that a shell splits correctly."""
    words = shlex.split(report(FAILED).again(FAILED))
    assert words[:3] == ["cpkit", "certify", "memory://x y"]
    assert words[3:] == ["--clause", "a.fails", "--seed", "7", "--rounds", "2"]


def test_as_json() -> None:
    """JSON has the suite's version, the verdicts and every clause."""
    found = json.loads(report(PASSED, FAILED, SKIPPED).to_json())
    assert found["suite"] == SUITE_VERSION
    assert found["ok"] is False
    assert found["levels"]["core"] == {
        "verdict": "fails",
        "passed": 1,
        "failed": 1,
        "unsupported": 0,
        "skipped": 0,
    }
    statuses = {clause["id"]: clause["status"] for clause in found["clauses"]}
    assert statuses == {"a.holds": "passed", "a.fails": "failed", "d.skips": "skipped"}
    assert found["clauses"][1]["expected"] == "x == 1"
    assert found["clauses"][1]["where"] == "clause.py:7\nin check"
    assert found["clauses"][2]["reason"] == "no server"


def test_limits_are_on_the_certificate() -> None:
    """JSON has them as numbers, Markdown as a sentence; a store may state none."""
    found = replace(report(PASSED), limits=Limits(10, 20))
    limits = json.loads(found.to_json())["limits"]
    assert (limits["max_value"], limits["max_append"]) == (10, 20)
    sentence = "values of up to 10 bytes and appends of up to 20 bytes"
    assert f"It accepts {sentence}." in found.to_markdown()
    assert json.loads(report(PASSED).to_json())["limits"] is None
    assert "accepts" not in report(PASSED).to_markdown()


def test_as_junit() -> None:
    """The XML is well-formed, whatever characters an error contains."""
    root = xml.fromstring(report(PASSED, FAILED, SKIPPED, UNSUPPORTED).to_junit())
    suites = {suite.get("name"): suite for suite in root}
    assert suites["core"].get("tests") == "2"
    assert suites["core"].get("failures") == "1"
    assert suites["durable"].get("skipped") == "1"
    failure = suites["core"].find("testcase[@name='a.fails']/failure")
    assert failure is not None
    assert "x == 1" in (failure.text or "")


def test_as_markdown() -> None:
    """The page has a table and the failures; no text breaks out of its block."""
    page = report(PASSED, FAILED, SKIPPED).to_markdown()
    assert SUITE_VERSION in page
    assert "| core | **fails** | 1 | 1 | 0 | 0 |" in page
    assert "````text\nexpected  x == 1" in page
    assert "where     clause.py:7\n          in check\n````" in page
    assert "a.holds \\| holds." in page
    assert "(no server)" in page


@pytest.mark.parametrize("form", ["to_json", "to_junit", "to_markdown"])
def test_an_empty_report_is_valid(form: str) -> None:
    """A report without clauses can be written in every form."""
    assert getattr(report(), form)()


def test_the_certificate_says_what_survived() -> None:
    """It is what was seen, which may be more or less than the store promises."""
    kill = outcome("kill.writes-survive", Status.PASSED, Level.DURABLE)
    power = outcome("powerloss.acknowledged-survives", Status.PASSED, Level.POWERLOSS)
    assert report(PASSED).survived == "not tested"
    assert report(kill, replace(power, status=Status.SKIPPED)).survived == "process"
    assert report(kill, power).survived == "machine"
    assert report(kill, replace(power, status=Status.FAILED)).survived == "less"
    assert json.loads(report(kill).to_json())["survived"] == "process"
    assert "survived: process" in report(kill).to_markdown()


def test_the_certificate_says_what_failovers_lost() -> None:
    """The sum over all clauses that lose a leader; nothing where none ran."""
    runs = [replace(PASSED, acknowledged=100), replace(PASSED, acknowledged=50, lost=2)]
    found = report(*runs)
    assert found.failovers == "2 of 150 acknowledged writes"
    assert "Failovers lost 2 of 150 acknowledged writes." in found.to_markdown()
    assert json.loads(found.to_json())["lost_in_failovers"] == found.failovers
    assert report(PASSED).failovers == ""


def test_what_survived_was_looked_at_after_a_kill() -> None:
    """A paused server was not killed; one holder of a key says nothing of the rest."""
    paused = outcome("server.paused-is-honest", Status.PASSED, Level.DURABLE)
    holder = outcome("powerloss.one-holder", Status.PASSED, Level.POWERLOSS)
    assert report(paused, holder).survived == "not tested"
    kill = outcome("powerloss.kill-at-every-call", Status.PASSED, Level.POWERLOSS)
    assert report(paused, holder, kill).survived == "process"
    two_holders = replace(holder, status=Status.FAILED)
    assert report(kill, two_holders).survived == "process"


def test_an_interrupted_run_says_so_in_every_form() -> None:
    """The certificate of a part cannot be taken for that of the whole."""
    part = replace(report(PASSED), unfinished=12)
    assert not part.ok
    assert "The run was interrupted: 12 clauses were not run." in part.to_markdown()
    (error,) = xml.fromstring(part.to_junit()).iter("error")
    assert error.get("message") == "12 clauses were not run"
    assert json.loads(part.to_json())["unfinished"] == 12


def test_a_password_is_not_in_the_repr() -> None:
    """The target as it was given is only in the command that can be pasted."""
    given = replace(report(FAILED), given="redis://:secret@host")
    assert "secret" not in repr(given)
    assert "secret" in given.again(FAILED, as_given=True)
