"""The tests of LangGraph's own SQLite package, with cpkit's saver in their place."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

PACKAGE = "langgraph-checkpoint-sqlite"
FILES = (
    "test_aiosqlite.py",
    "test_sqlite.py",
    "test_delta_parent_walk.py",
    "test_get_delta_channel_history.py",
    "test_delta_channel_migration.py",
)

# What only a saver with LangGraph's tables can pass, and why.
DIFFERENT = {
    "test_informative_async_errors": "a sync saver is refused on a running loop",
    "test_checkpoint_search_sql_injection_prevention": "there is no SQL in a filter",
    "test_walk_step_looks_up_the_parent_by_primary_key": "it explains a query",
    "test_seed_present_when_snapshot_in_ancestor_sync": (
        "it puts a checkpoint again with another value for the same version"
    ),
}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_langgraphs_own_tests_pass(tmp_path: Path) -> None:
    """All pass that do not look into LangGraph's tables."""
    wanted = f"{PACKAGE}=={version(PACKAGE)}"
    options = ["-q", "--no-deps", "--no-binary", ":all:", "--dest", str(tmp_path)]
    command = [sys.executable, "-m", "pip", "download", *options, wanted]
    loaded = subprocess.run(command, capture_output=True, text=True)

    if loaded.returncode:
        pytest.skip(f"the package index has no source of {wanted}")

    (archive,) = tmp_path.glob("*.tar.gz")

    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")

    (folder,) = tmp_path.glob("*/tests")
    own, ours = run(folder, []), run(folder, ["-p", "langgraph_substitute"])
    assert len(own) >= 30
    assert {name for name, passed in own.items() if not passed} == set()
    failed = {name.rpartition(".")[2] for name, passed in ours.items() if not passed}
    assert ours.keys() == own.keys()
    assert failed == DIFFERENT.keys()


def run(folder: Path, options: list[str]) -> dict[str, bool]:
    """Run the tests; return which of them passed, by name."""
    report = folder.parent / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null"]
    command += ["-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
    command += ["--rootdir", str(folder.parent), f"--junitxml={report}", *options]
    subprocess.run(
        [*command, *(str(folder / name) for name in FILES)],
        cwd=folder.parent,
        env={"PYTHONPATH": str(Path(__file__).parent), "PATH": ""},
        capture_output=True,
        timeout=600,
    )
    return {
        f"{case.get('classname')}.{case.get('name')}": case.find("failure") is None
        and case.find("error") is None
        for case in ElementTree.parse(report).iter("testcase")
    }
