"""The check of the prose, which ``make lint`` runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.core import plain_words
from tests.core.plain_words import check, main


@pytest.mark.parametrize(
    ("text", "line", "phrase"),
    [
        ("x = 1  # whoever calls", 1, "whoever"),  # plain-words: ignore sample
        ("# The key is\n# no secret.", 1, "is no secret"),
        ('"""One.\n\nLet it go.\n"""', 3, "Let it go"),  # plain-words: ignore sample
        ('f("there", "a lock is "\n  "no lock")', 1, "is no lock"),
        ('f"{x} begins anew"', 1, "anew"),  # plain-words: ignore sample
        ("def test_it_is_no_error(): ...", 1, "is no error"),
    ],
)
def test_a_phrase_in_python_is_found(text: str, line: int, phrase: str) -> None:
    """In a comment, a string or a name, also where it goes over a line end."""
    assert [found[1:3] for found in check("a.py", text)] == [(line, phrase)]


@pytest.mark.parametrize("path", ["a.md", "a.sql", "a.lua", "Makefile"])
def test_a_phrase_in_any_other_file_is_found(path: str) -> None:
    """The whole text is checked."""
    [found] = check(path, "one\ntwo nobody\n")  # plain-words: ignore sample
    assert str(found).startswith(f"{path}:2: 'nobody': write")  # plain-words: ignore it


@pytest.mark.parametrize(
    "text",
    [
        "# There is no thread of that id, and the answer is no.",
        "# It is no longer open.",
        "if somebody is None: raise anew",  # plain-words: ignore sample
        "# plain-words: ignore a quotation\n# Somebody",
        "# Somebody  plain-words: ignore a quotation",
    ],
)
def test_plain_words_pass(text: str) -> None:
    """Code is not prose, and a marker with a reason excuses its line and the next."""
    assert check("a.py", text) == []


def test_a_marker_without_a_reason_excuses_nothing() -> None:
    """It needs a word after it."""
    # plain-words: ignore sample
    assert check("a.md", "whoever <!-- plain-words: ignore -->")


def test_the_command_checks_the_tracked_files(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """It prints the findings, and fails as long as there is one."""
    page = tmp_path / "page.md"
    page.write_text("anew")  # plain-words: ignore sample
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    monkeypatch.setattr(plain_words, "ROOT", tmp_path)
    assert main() == 1
    # plain-words: ignore sample
    assert "page.md:1: 'anew'" in capsys.readouterr().out

    page.write_text("again")
    assert (main(), capsys.readouterr().out) == (0, "")
