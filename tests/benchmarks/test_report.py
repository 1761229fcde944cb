"""The verdicts on a run's figures, and the report that shows them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import __main__, report
from benchmarks.chart import chart
from benchmarks.figures import Figures
from benchmarks.goals import GOALS, Goal


def figure(name: str, workload: str, micros: float, family: str = "append") -> Any:
    """Return a result as the results file has it."""
    return {
        "driver": "sqlite",
        "name": name,
        "workload": workload,
        "family": family,
        "median": micros / 1e6,
        "spread": micros / 1e7,
        "mean": micros / 1e6,
        "error": None,
    }


@pytest.fixture
def run() -> dict[str, Any]:
    """A run of one driver, with invented figures."""
    peer = "LangGraph AsyncSqliteSaver"
    return {
        "machine": {"processors": "2"},
        "options": "none",
        "versions": {"Python": "3.11"},
        "skipped": {"sqlite, cubeloop": "No module named 'cubeloop'"},
        "durability": {"sqlite": {"cpkit": "machine: synced"}},
        "results": [
            figure("floor", "append@0", 100),
            figure("floor", "append@10000", 100),
            figure("cpkit", "append@0", 110),
            figure("cpkit", "append@10000", 150),
            figure(peer, "append@0", 90),
            figure(peer, "append@10000", 30_000),
            figure("floor", "tasks-64-one", 100, "tasks"),
            figure("cpkit", "tasks-64-one", 10, "tasks"),
            figure("cpkit", "extra", 10, "extra") | {"error": "lost a key"},
        ],
        "costs": [
            {
                "driver": "sqlite",
                "name": name,
                "fsyncs": 1.0,
                "bytes": 9000.0,
                "counted": "strace",
                "why": [],
            }
            for name in ("floor", "cpkit")
        ],
        "layers": [
            figure("floor", "one append", 100) | {"family": "layers"},
            figure("append()", "one append", 125) | {"family": "layers"},
            figure("broken", "one append", 1) | {"error": "no such layer"},
        ],
        "decoding": {"one array of text": 2.5e-6},
        "memory": [],
        "crowd": [],
        "imports": {"pydantic": 0.1, "cpkit": 0.2},
        "wake": [
            {
                "driver": "sqlite",
                "what": "decision to handler",
                "changes": 100,
                "p50 ms": 12.5,
                "p99 ms": 51.0,
            },
            {"driver": "sqlite", "what": "append, no task waits", "ratio": 1.01},
        ],
    }


def test_each_goal_that_was_measured_has_a_verdict(run: dict[str, Any]) -> None:
    """Time, rate, growth, cost and distance to LangGraph; a failed cell has none."""
    found = {
        verdict.title: (round(verdict.ratio, 3), verdict.met)
        for verdict in Figures(run).verdicts()
    }
    assert found == {
        "append@0": (1.1, True),
        "append@10000": (1.5, False),
        "append@10000 / append@0": (round(150 / 110, 3), False),
        "tasks-64-one": (10.0, True),
        "fsyncs": (1.0, True),
        "bytes": (1.0, True),
        "import": (2.0, False),
        "decision to handler, p99 ms": (51.0, False),
        "append, no task waits, ratio": (1.01, True),
        "append@10000, LangGraph AsyncSqliteSaver by cpkit": (200.0, True),
    }


def test_a_peer_that_is_faster_is_named(run: dict[str, Any]) -> None:
    """The ratio says how much longer cpkit takes."""
    (found,) = Figures(run).slower_than()
    driver, workload, name, ratio = found
    assert (driver, workload) == ("sqlite", "append@0")
    assert name == "LangGraph AsyncSqliteSaver"
    assert ratio == pytest.approx(110 / 90)


def test_the_report_shows_ratios_failures_and_what_is_missing(
    run: dict[str, Any], tmp_path: Path
) -> None:
    """The plots are separate files, and rendering twice gives the same text."""
    report.write(run, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")

    assert "| sqlite | append@10000 | ≤ 1.4× | 1.50× | not |" in text
    assert "| sqlite | decision to handler, p99 ms | ≤ 50 ms | 51.0 ms | not |" in text
    assert "| decision to handler | 100 | p50 ms 12.5, p99 ms 51.0 |" in text
    assert "| cpkit | 110 ±11 (1.10×) | 150 ±15 (1.50×) |" in text
    assert "| cpkit | 100,000/s (10.00×) |" in text
    assert "| append() | 125 ±12 | 1.25× | +25 |" in text
    assert "| one array of text | 2.50 |" in text
    assert "- failed: sqlite, cpkit, extra: lost a key" in text
    assert "- failed: sqlite, broken, one append: no such layer" in text
    assert "- not measured: sqlite, cubeloop: No module named 'cubeloop'" in text
    assert "![One append, by messages in the thread](append-sqlite.svg)" in text
    ElementTree.parse(tmp_path / "append-sqlite.svg")
    report.write(Figures(run).run, tmp_path)
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == text


def test_a_report_is_rendered_again_from_the_results_file(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--again`` measures nothing, and writes nothing but the report."""
    results, folder = tmp_path / "results.json", tmp_path / "report"
    results.write_text(json.dumps(run), encoding="utf-8")
    options = ["--again", "--results", str(results), "--report", str(folder)]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *options])

    __main__.main()

    names = sorted(path.name for path in folder.iterdir())
    assert names == ["append-sqlite.svg", "report.md"]
    assert json.loads(results.read_text(encoding="utf-8")) == run


def test_a_driver_is_added_to_the_results_of_others(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--add`` replaces the figures of what is measured, and no others."""
    results = tmp_path / "results.json"
    results.write_text(json.dumps(run | {"crowd": [{"driver": "file"}]}))
    options = ["--add", "--quick", "--only", "file", "--workloads", "open"]
    options += ["--results", str(results), "--report", str(tmp_path / "report")]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *options])

    __main__.main()

    found = json.loads(results.read_text(encoding="utf-8"))
    new = [row for row in found["results"] if row["driver"] == "file"]
    assert {row["family"] for row in new} == {"open"}
    assert found["results"] == run["results"] + new
    assert found["crowd"] == []
    assert {*found["durability"]} == {"sqlite", "file"}
    assert found["wake"] == run["wake"]
    assert found["imports"] == run["imports"]


def test_a_report_without_results_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the missing file and the command to run first."""
    options = ["--again", "--results", str(tmp_path / "none.json")]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *options])

    with pytest.raises(SystemExit, match="2"):
        __main__.main()

    assert "none.json does not exist: run without this option first" in (
        capsys.readouterr().err
    )


def test_a_chart_has_a_line_for_each_name() -> None:
    """The line stays within its frame, and names are escaped."""
    drawn = ElementTree.fromstring(
        chart("a < b", "x", {"cpkit": {0: 10, 1000: 12}, "<other>": {0: 5, 1000: 5e6}})
    )
    space = "{http://www.w3.org/2000/svg}"
    lines = drawn.findall(f"{space}polyline")
    points = [
        tuple(map(float, p.split(","))) for p in lines[1].attrib["points"].split()
    ]

    assert len(lines) == 2
    assert "<other>" in [text.text for text in drawn.findall(f"{space}text")]
    assert points[0][0] < points[1][0]
    assert points[0][1] > points[1][1]
    assert all(0 <= x <= 860 and 0 <= y <= 420 for x, y in points)


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.title)
def test_a_goal_is_met_up_to_its_limit(goal: Goal) -> None:
    """At the limit and on its better side; slack allows a little more."""
    for driver, limit in goal.limits.items():
        better, worse = (0.9, 1.1) if goal.kind != "rate" else (1.1, 0.9)

        assert goal.met(driver, limit)
        assert goal.met(driver, limit * better)
        assert not goal.met(driver, limit * worse)
        assert goal.met(driver, limit * worse, slack=2)
        assert goal.ratio(2.0, 1.0) == (0.5 if goal.kind == "rate" else 2.0)
