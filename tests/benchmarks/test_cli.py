"""``cpkit bench``: the table, the JSON and the exit codes."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from cpkit.cli.bench import bench

SHORT = ["--quick", "--rounds", "1", "--workload", "extra", "--workload", "calls"]

app = typer.Typer()
app.command()(bench)


def invoke(*arguments: str) -> Result:
    """Run the verb as the command would."""
    return CliRunner().invoke(app, [*arguments])


def test_stores_are_measured_side_by_side_and_left_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column for each, and nothing stays in them."""
    monkeypatch.chdir(tmp_path)
    urls = ["sqlite:///a.db", "file:b"]
    done = invoke(*urls, *SHORT)

    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0].split() == ["workload", *urls]
    assert "calls-replayed" in done.stdout
    assert "× the time)" in done.stdout
    assert "synchronous=FULL" in done.stdout

    with sqlite3.connect(tmp_path / "a.db") as db:
        for table in ("threads", "messages", "extra", "calls"):
            assert db.execute(f"SELECT count(*) FROM cpkit_{table}").fetchone() == (0,)

    db.close()
    assert not list((tmp_path / "b" / "threads").iterdir())


def test_json_has_every_round(tmp_path: Path) -> None:
    """In seconds, with what the store promises beside it."""
    done = invoke(f"sqlite:///{tmp_path}/a.db", *SHORT, "--json")
    found = json.loads(done.stdout)

    assert done.exit_code == 0
    assert found["unit"] == "seconds per operation"
    assert [one["workload"] for one in found["results"]] == [
        "calls-fresh",
        "calls-replayed",
        "extra",
    ]
    assert all(one["rounds"] == [one["median"]] for one in found["results"])


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["memory://", "--workload", "sleep"], 2, "unknown --workload 'sleep'"),
        (["nonsense://"], 2, "no driver for 'nonsense'"),
        (["memory://", "redis://127.0.0.1:1/0?connect_timeout=0.1"], 3, "127.0.0.1:1"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_line(
    arguments: list[str], code: int, said: str
) -> None:
    """Bad use is 2, a store that is away is 3."""
    done = invoke(*arguments)
    assert done.exit_code == code
    assert said in done.output
    assert not done.stdout
