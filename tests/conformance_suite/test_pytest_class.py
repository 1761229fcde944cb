"""The pytest class, as the author of a backend uses it in another project."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long  # another pytest collects the whole suite

PROJECT = {
    "mine.py": """
from cpkit import MemoryCheckpointer

class Mine(MemoryCheckpointer):
    def __init__(self, path, **options):
        super().__init__(path, **options)

    async def append(self, thread_id, messages, **options):
        messages = messages[::-1] if len(messages) == 11 else messages
        return await super().append(thread_id, messages, **options)
""",
    "test_mine.py": """
from dataclasses import dataclass

import pytest
from conformance import ConformanceTests, Harness
from mine import Mine

@dataclass
class MyHarness(Harness):
    path: str

    def open(self, **options):
        return Mine(self.path, **options)

class TestMine(ConformanceTests):
    @pytest.fixture
    def harness(self, tmp_path):
        return MyHarness(str(tmp_path))
""",
    "test_forgotten.py": """
from conformance import ConformanceTests

class TestForgotten(ConformanceTests):
    pass
""",
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest prints in the project, without plugins and cpkit's configuration."""
    folder = tmp_path_factory.mktemp("project")

    for name, text in PROJECT.items():
        (folder / name).write_text(text)

    wanted = (
        "append.keeps or append.returns or server.writes or kill.exit-loses-nothing"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:asyncio", "-p", "no:cacheprovider"]
        + ["-v", "-k", wanted],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200", "PYTEST_ADDOPTS": "", "CPKIT_SEED": "5"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.stdout.decode()


def test_each_clause_is_a_test(printed: str) -> None:
    """A clause is a test with its id as the name, and needs no asyncio plugin."""
    assert "TestMine::test_clause[append.returns-version] PASSED" in printed
    assert "TestMine::test_clause[server.writes-survive] SKIPPED" in printed
    assert "TestMine::test_clause[append.keeps-order] FAILED" in printed


def test_a_failure_can_be_read(printed: str) -> None:
    """pytest shows the assert with its values, the sentence, and the seed."""
    assert "assert loaded.messages == sent" in printed
    assert "{'n': 14} != {'n': 4}" in printed
    assert "runner.py" not in printed
    assert "append.keeps-order: Messages come back in the order" in printed
    assert "again with CPKIT_SEED=5" in printed


def test_other_processes_find_the_harness(printed: str) -> None:
    """A harness in a test file can be built in a worker process."""
    # The store is in memory, so the worker process opens another store.
    assert "an order of operations that explains every answer" in printed
    assert "expected another process" not in printed


def test_a_missing_fixture_is_explained(printed: str) -> None:
    """Without the fixture, pytest's output says what to define."""
    assert "define a fixture 'harness' in your test class" in printed
