"""``make`` takes the newest Python that works, and says in one line what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = "awk bash cp dirname ls mkdir rm sh sort touch".split()

FAKE = """#!/bin/sh
case "$1 $2" in
"-c "*) echo "fake {version}" ;;
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip") echo "Collecting pydantic>=2.10 (from cpkit)" ;;
*) echo "Python {version}" ;;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the script, and a search path without any Python."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / "scripts" / "venv.sh", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").touch()
    os.utime(tmp_path / "pyproject.toml", (1, 1))

    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)

    return tmp_path


def add_python(project: Path, version: str, script: str = FAKE) -> None:
    file = project / "bin" / f"python{version}"
    file.write_text(script.replace("{version}", version))
    file.chmod(0o755)


def run(project: Path, python: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [project / "scripts" / "venv.sh", ".venv", "all"],
        env={"PATH": str(project / "bin"), "HOME": str(project), "PYTHON": python},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_newest_python_that_works_is_taken(project: Path) -> None:
    """A shim without an interpreter behind it is passed over."""
    add_python(project, "3.12")
    add_python(project, "3.13")
    add_python(project, "3.14", "#!/bin/sh\nexit 127\n")

    done = run(project)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "Installing cpkit[all] with Python 3.13 into .venv",
        "  pydantic",
    ]
    assert run(project).stdout == ""


def test_another_python_makes_the_environment_again(project: Path) -> None:
    """``PYTHON=`` chooses; without it, the environment that exists is kept."""
    add_python(project, "3.12")
    add_python(project, "3.13")
    run(project)

    done = run(project, "python3.12")

    assert "Removing .venv: it was not made with python3.12" in done.stdout
    assert "with Python 3.12 into .venv" in done.stdout
    assert run(project).stdout == ""
    assert run(project, "python3.12").stdout == ""


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("", "make: no Python 3.11 or newer with venv, ssl and sqlite3 was found; "),
        ("python3.99", "make: PYTHON=python3.99 is not a Python 3.11 or newer "),
    ],
)
def test_a_missing_python_is_one_line(project: Path, python: str, said: str) -> None:
    """The line says what to install, or which variable is wrong."""
    done = run(project, python)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
    assert not (project / ".venv").exists()
