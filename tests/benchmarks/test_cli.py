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
    """Run the command."""
    return CliRunner().invoke(app, [*arguments])


def test_stores_are_measured_side_by_side_and_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table has a column for each store, and nothing stays in the stores."""
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
    """Times are in seconds."""
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
    ("arguments", "code", "message"),
    [
        (["memory://", "--workload", "sleep"], 2, "unknown --workload 'sleep'"),
        (["nonsense://"], 2, "no driver for 'nonsense'"),
        (["memory://", "redis://127.0.0.1:1/0?connect_timeout=0.1"], 3, "127.0.0.1:1"),
    ],
)
def test_a_store_that_cannot_be_measured_is_an_error(
    arguments: list[str], code: int, message: str
) -> None:
    """The exit code is 2 for bad use, 3 for a store that is unavailable."""
    done = invoke(*arguments)
    assert done.exit_code == code
    assert message in done.output
    assert not done.stdout
