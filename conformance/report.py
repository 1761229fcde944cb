"""The certificate: the outcome of every clause, and how to repeat a failed one.

`Report` is available as data, JSON, Markdown and JUnit XML.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from dataclasses import dataclass, field
from xml.etree import ElementTree as xml

from conformance.clause import Level
from conformance.runner import Outcome, Status
from cpkit.driver import Limits

__all__ = ["SUITE_VERSION", "Report"]

SUITE_VERSION = "1.9"
"""The version of the list of clauses. A new or stricter clause needs a new version."""


@dataclass(frozen=True)
class Report:
    """The outcomes of the clauses for one store.

    ``durability`` is what the store itself states.
    """

    target: str
    durability: str
    seed: int
    rounds: float
    outcomes: list[Outcome]
    asked: tuple[str, ...] = ()
    """The levels that the caller named; empty means all that apply."""
    limits: Limits | None = None
    """What the store's handle accepts, in bytes; ``None`` where it has no limits."""
    given: str = field(default="", repr=False)
    """The target as the caller gave it; it may contain a password."""
    unfinished: int = 0
    """Clauses that were not run, because the run was interrupted or stopped."""

    @property
    def ok(self) -> bool:
        """Whether every clause was run and none failed.

        A level that the caller named must also have a clause that passed.
        """
        return not (self.failures or self.unfinished) and all(
            self.counts(level)[Status.PASSED] for level in self.asked
        )

    @property
    def failures(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.status is Status.FAILED]

    @property
    def levels(self) -> list[Level]:
        """The levels of all clauses in the report."""
        present = {one.clause.level for one in self.outcomes}
        return [level for level in Level if level in present]

    @property
    def survived(self) -> str:
        """What acknowledged writes were seen to survive in this run.

        ``machine`` after power losses, ``process`` after kills; ``less`` where a clause
        of these failed, and ``not tested`` where none was checked.
        """
        kills = [
            one
            for one in self.outcomes
            if one.clause.subject in ("kill", "server", "powerloss")
            and one.clause.id != "powerloss.one-holder"  # about keys, not about losses
        ]
        passed = [one.clause.id for one in kills if one.status is Status.PASSED]

        if any(one.status is Status.FAILED for one in kills):
            return "less"

        if "powerloss.acknowledged-survives" in passed:
            return "machine"

        # Other clauses of these subjects pause the server, or open the store.
        looks = [
            one for one in passed if one.endswith(("survive", "kill-at-every-call"))
        ]
        return "process" if looks else "not tested"

    @property
    def failovers(self) -> str:
        """How many acknowledged writes were lost in failovers, as text, or nothing."""
        acknowledged = sum(one.acknowledged for one in self.outcomes)
        lost = sum(one.lost for one in self.outcomes)
        return f"{lost} of {acknowledged} acknowledged writes" if acknowledged else ""

    @property
    def sizes(self) -> str:
        """The limits as text, or nothing."""
        if self.limits is None:
            return ""

        return (
            f"values of up to {self.limits.max_value} bytes and appends of up to "
            f"{self.limits.max_append} bytes"
        )

    @property
    def unasked(self) -> dict[str, list[str]]:
        """The ids of clauses that were not checked, by the reason."""
        found: dict[str, list[str]] = {}

        for one in self.outcomes:
            if _is_not_checked(one):
                found.setdefault(one.reason, []).append(one.clause.id)

        return found

    def same_error(self, outcome: Outcome) -> list[Outcome]:
        """Return the failures by the error of this one, in the order of the run.

        Numbers and random ids in the text do not count. A failure that is not an error
        of the store is alone.
        """
        if outcome.expected != "no error":
            return [outcome]

        error = _without_ids(outcome)
        return [one for one in self.failures if _without_ids(one) == error]

    def counts(self, level: str) -> Counter[Status]:
        """Count the outcomes of a level by status."""
        return Counter(one.status for one in self.outcomes if one.clause.level == level)

    def verdict(self, level: str) -> str:
        """Return ``holds``, ``fails`` or ``not asked`` for a level."""
        counts = self.counts(level)

        if counts[Status.FAILED]:
            return "fails"

        return "holds" if counts[Status.PASSED] else "not asked"

    def again(self, outcome: Outcome, *, as_given: bool = False) -> str:
        """Return the command that checks this one clause again.

        With ``as_given`` it can be pasted, but it may show the target's password.
        """
        target = (as_given and self.given) or self.target
        words = ["cpkit", "certify", target, "--clause", outcome.clause.id]
        words += ["--seed", str(self.seed)]

        if self.rounds != 1:
            words += ["--rounds", f"{self.rounds:g}"]

        return shlex.join(words)

    def to_json(self) -> str:
        """Return the report as a JSON object."""
        return json.dumps(
            {
                "suite": SUITE_VERSION,
                "target": self.target,
                "durability": self.durability,
                "survived": self.survived,
                "lost_in_failovers": self.failovers or None,
                "limits": None if self.limits is None else self.limits._asdict(),
                "seed": self.seed,
                "rounds": self.rounds,
                "ok": self.ok,
                "unfinished": self.unfinished,
                "levels": {
                    level: {
                        "verdict": self.verdict(level),
                        **{s: self.counts(level)[s] for s in Status},
                    }
                    for level in self.levels
                },
                "clauses": [self._one(outcome) for outcome in self.outcomes],
            },
            indent=2,
        )

    def to_markdown(self) -> str:
        """Return the report as a Markdown page."""
        about = (
            f"cpkit conformance suite {SUITE_VERSION}, seed {self.seed}, rounds "
            f"{self.rounds:g}. The store promises the durability {self.durability}. In "
            f"this run survived: {self.survived}."
        )

        if self.failovers:
            about += f" Failovers lost {self.failovers}."

        if self.limits is not None:
            about += f" It accepts {self.sizes}."

        if self.unfinished:
            about += (
                f" The run was interrupted: {self.unfinished} clauses were not run."
            )

        lines = [
            f"# Certificate of `{self.target}`",
            "",
            about,
            "",
            "| Level | Verdict | Passed | Failed | Unsupported | Skipped |",
            "|---|---|---:|---:|---:|---:|",
        ]

        for level in self.levels:
            counts = self.counts(level)
            lines.append(
                f"| {level} | **{self.verdict(level)}** | "
                + " | ".join(str(counts[status]) for status in Status)
                + " |"
            )

        for outcome in self.failures:
            lines += [
                "",
                f"## Fails: `{outcome.clause.id}`",
                "",
                outcome.clause.sentence,
                "",
                *_fenced(_facts(outcome)),
                "",
                *_fenced(self.again(outcome)),
            ]

        lines += ["", "## Clauses", "", "| | Clause | Sentence |", "|---|---|---|"]

        for outcome in self.outcomes:
            why = f" ({outcome.reason})" if _is_not_checked(outcome) else ""
            lines.append(
                f"| {outcome.status} | `{outcome.clause.id}` | "
                + _cell(outcome.clause.sentence + why)
                + " |"
            )

        return "\n".join(lines) + "\n"

    def to_junit(self) -> str:
        """Return the report as JUnit XML, with a test suite for each level."""
        root = xml.Element("testsuites", name=f"cpkit conformance {SUITE_VERSION}")

        for level in self.levels:
            outcomes = [one for one in self.outcomes if one.clause.level == level]
            counts = self.counts(level)
            suite = xml.SubElement(
                root,
                "testsuite",
                name=level,
                tests=str(len(outcomes)),
                failures=str(counts[Status.FAILED]),
                skipped=str(counts[Status.SKIPPED] + counts[Status.UNSUPPORTED]),
                time=f"{sum(one.seconds for one in outcomes):.3f}",
            )

            for one in outcomes:
                self._junit_case(suite, one)

        if self.unfinished:
            why = f"{self.unfinished} clauses were not run"
            suite = xml.SubElement(
                root, "testsuite", name="interrupted", tests="1", errors="1"
            )
            case = xml.SubElement(suite, "testcase", name="the run was interrupted")
            xml.SubElement(case, "error", message=why)

        return xml.tostring(root, encoding="unicode", xml_declaration=True)

    def _junit_case(self, suite: xml.Element, outcome: Outcome) -> None:
        element = xml.SubElement(
            suite,
            "testcase",
            classname=f"conformance.{outcome.clause.level}",
            name=outcome.clause.id,
            time=f"{outcome.seconds:.3f}",
        )

        if outcome.status is Status.FAILED:
            failure = xml.SubElement(
                element, "failure", message=_xml_text(outcome.clause.sentence)
            )
            failure.text = _xml_text(
                f"{_facts(outcome)}\nagain     {self.again(outcome)}\n\n{outcome.trace}"
            )
        elif _is_not_checked(outcome):
            why = f"{outcome.status}: {outcome.reason}"
            xml.SubElement(element, "skipped", message=_xml_text(why))

    def _one(self, outcome: Outcome) -> dict[str, object]:
        found: dict[str, object] = {
            "id": outcome.clause.id,
            "level": outcome.clause.level,
            "sentence": outcome.clause.sentence,
            "status": outcome.status,
            "seconds": round(outcome.seconds, 3),
        }

        if outcome.status is Status.FAILED:
            found["expected"] = outcome.expected
            found["seen"] = outcome.seen
            found["where"] = outcome.where
            found["again"] = self.again(outcome)
        elif _is_not_checked(outcome):
            found["reason"] = outcome.reason

        return found


def _is_not_checked(outcome: Outcome) -> bool:
    return outcome.status in (Status.SKIPPED, Status.UNSUPPORTED)


def _without_ids(outcome: Outcome) -> tuple[str, str, str]:
    line = outcome.where.partition("\n")[0]
    seen = re.sub(r"\w*\d\w*", "#", outcome.seen)
    return outcome.expected, seen, line


def _facts(outcome: Outcome) -> str:
    """Return what was expected, what was seen and where, as text."""
    facts = {"expected": outcome.expected, "seen": outcome.seen, "where": outcome.where}
    return "\n".join(
        f"{name:<10}" + text.replace("\n", "\n" + " " * 10)
        for name, text in facts.items()
    )


def _fenced(text: str) -> list[str]:
    """Return a code block with a fence that is longer than any in the text."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return [f"{fence}text", text, fence]


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def _xml_text(text: str) -> str:
    """Replace characters that XML 1.0 does not allow."""
    return re.sub(
        "[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text
    )
