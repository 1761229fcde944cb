"""``cpkit new-backend``: what it creates is a store that certifies."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from conformance import Harness, Status, run_clause, select
from cpkit import Checkpointer
from cpkit.driver import handle_over
from tests.cli.command import environment, invoke

ROOT = Path(__file__).parents[2]
URLS = {
    "server": "db-server://localhost/db",
    "embedded": "db-embedded:state",
    "key-value": "db-key-value:state",
}

# Quick ones of every ability.
CLAUSES = ["find", "receipts", "read", "trim.removes-below", "claim.leaves-the-rest"]


def _entry(kind: str, project: Path) -> tuple[str, str]:
    """Return the module and the class of the entry point."""
    text = (project / "pyproject.toml").read_text()
    found = re.search(rf'^db-{kind} = "(.*):(.*)"$', text, flags=re.MULTILINE)
    assert found is not None
    return found[1], found[2]


class _Created(Harness):
    """The store that a new backend's entry point names."""

    def __init__(self, kind: str, project: Path) -> None:
        module, name = _entry(kind, project)
        self.driver: Any = getattr(importlib.import_module(module), name)
        self.url = URLS[kind]

    def open(self, **options: Any) -> AbstractAsyncContextManager[Checkpointer[Any]]:
        kind = options.pop("message_type", dict)
        given = self.driver.Options(**options)
        store = self.driver.from_url(self.url, given)
        return handle_over(store, message_type=kind, options=given)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", URLS)
def test_a_new_backend_certifies(
    kind: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was created, with all abilities but a search."""
    said = invoke("new-backend", f"db-{kind}", "--kind", kind).out
    project = here / f"cpkit-db-{kind}"
    assert f"cpkit certify {URLS[kind]} --level core" in said
    monkeypatch.syspath_prepend(project)
    harness = _Created(kind, project)
    found = [run_clause(one, harness) for one in select(["core", "optional"], CLAUSES)]
    assert [one for one in found if one.status is not Status.PASSED] == []


@pytest.mark.long  # mypy reads the whole kit, and two levels have 280 clauses
@pytest.mark.parametrize("kind", URLS)
def test_a_new_backend_is_typed_and_complete(kind: str, here: Path) -> None:
    """Its types hold, and the levels core and optional by its URL."""
    invoke("new-backend", f"db-{kind}", "--kind", kind)
    project = here / f"cpkit-db-{kind}"
    module = f"cpkit_db_{kind}".replace("-", "_")
    # What pip makes of it.
    known = project / f"{module}-0.1.0.dist-info"
    known.mkdir()
    (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\n")
    entry = _entry(kind, project)
    (known / "entry_points.txt").write_text(
        f"[cpkit.drivers]\ndb-{kind} = {':'.join(entry)}\n"
    )
    levels = ("--level", "core", "--level", "optional", "--rounds", "0.5")

    for words in (
        ("cpkit", "certify", URLS[kind], *levels),
        ("mypy", "--strict", str(project / module)),
    ):
        paths = [str(ROOT), str(project)]
        done = subprocess.run(
            [sys.executable, "-m", *words],
            env=environment({"PYTHONPATH": os.pathsep.join(paths)}),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_overwritten(here: Path) -> None:
    (here / "cpkit-db").mkdir()
    done = invoke("new-backend", "db", "--kind", "server")
    assert (done.code, list(here.iterdir())) == (2, [here / "cpkit-db"])
    assert "cpkit-db exists" in done.err


def test_a_name_that_is_not_a_module_is_refused(here: Path) -> None:
    done = invoke("new-backend", "My DB", "--kind", "server")
    assert (done.code, list(here.iterdir())) == (2, [])
    assert "lower case letters" in done.err
