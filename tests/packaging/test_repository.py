"""The files for the hosting site and for pre-commit name what exists."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # it has no types

ROOT = Path(__file__).parents[2]
FILES = [
    *ROOT.glob(".github/**/*.yml"),
    ROOT / ".pre-commit-config.yaml",
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_file_is_valid_yaml(file: Path) -> None:
    """It has content, too."""
    assert yaml.safe_load(file.read_text(encoding="utf-8"))


def test_the_workflow_runs_what_a_contributor_can_run() -> None:
    """Each step is a verb of the Makefile, or the script for CI."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    verbs = re.findall(r"^([a-z-]+):.* ## ", (ROOT / "Makefile").read_text(), re.M)
    allowed = {".ci/run", *(f"make {verb}" for verb in verbs)}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = {step["run"] for step in steps if "run" in step}
    assert commands
    assert commands <= allowed
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_pre_commit_runs_what_make_lint_runs() -> None:
    """Each hook is a command of ``make lint``, in the environment that make creates."""
    lint = (ROOT / "Makefile").read_text()
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]

    for hook in [hook for repository in hooks for hook in repository["hooks"]]:
        command = hook["entry"].replace(".venv/bin", "$(BIN)")
        assert command.removesuffix(" --force-exclude") in lint
