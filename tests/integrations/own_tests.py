"""The tests in a framework's source package, run with cpkit's adapter."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Container, Sequence
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

__all__ = ["bare", "install", "run", "source_of"]

HERE = Path(__file__).parent


def source_of(package: str, folder: Path) -> Path:
    """Return the source of the installed version; skip if the index has none."""
    wanted = f"{package}=={version(package)}"
    options = ["-q", "--no-deps", "--no-binary", ":all:", "--dest", str(folder)]

    if not _pip("download", *options, wanted):
        pytest.skip(f"the package index has no source of {wanted}")

    (archive,) = folder.glob("*.tar.gz")

    with tarfile.open(archive) as tar:
        tar.extractall(folder / "source", filter="data")

    (source,) = (folder / "source").iterdir()
    return source


def install(folder: Path, *packages: str) -> Path:
    """Install what only the framework's tests need, into a folder of its own."""
    if not _pip("install", "-q", "--no-deps", "--target", str(folder), *packages):
        pytest.skip(f"the package index has no {', '.join(packages)}")

    return folder


def run(
    tests: Path,
    files: Sequence[str],
    *options: str,
    different: Container[str] = (),
    paths: Sequence[Path] = (),
    env: dict[str, str] | None = None,
) -> dict[str, bool]:
    """Run the files in the folder of tests; return which tests passed, by name.

    If tests fail that are not ``different``, all that failed run again, because some
    wait for milliseconds.
    """
    found = _run(tests, files, options, paths, env)
    failed = [name for name, passed in found.items() if not passed]

    if all(bare(name) in different for name in failed):
        return found

    again = _run(tests, files, [*options, "--last-failed"], paths, env)
    return found | {name: again[name] for name in failed if name in again}


def bare(name: str) -> str:
    """Return the name of a test without its class and parameters."""
    return name.partition("[")[0].rpartition(".")[2]


def _run(
    tests: Path,
    files: Sequence[str],
    options: Sequence[str],
    paths: Sequence[Path],
    env: dict[str, str] | None,
) -> dict[str, bool]:
    # The framework itself stands beside its tests in some packages.
    root = tests.parent.with_name("alone")

    if not root.exists():
        root.mkdir()
        (root / "tests").symlink_to(tests)

    report = root / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null"]
    command += ["-p", "no:langsmith_plugin", "-o", f"cache_dir={root / 'cache'}"]
    command += ["--rootdir", str(root), f"--junitxml={report}", *options]
    subprocess.run(
        [*command, *(f"tests/{name}" for name in files)],
        cwd=root,
        env={
            "PYTHONPATH": ":".join(map(str, [HERE, *paths])),
            "PATH": "",
            **(env or {}),
        },
        capture_output=True,
        timeout=1800,
    )
    return {
        f"{case.get('classname')}.{case.get('name')}": case.find("failure") is None
        and case.find("error") is None
        for case in ElementTree.parse(report).iter("testcase")
    }


def _pip(*arguments: str) -> bool:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True).returncode == 0
