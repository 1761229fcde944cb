"""The site builds, and the code on its pages runs unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from runpy import run_path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

import cpkit.driver
import cpkit.effects
import cpkit.sessions
from tests.docs.pages import DOCS, blocks_of, printed_by, printed_by_process

ROOT = DOCS.parent

# Pages whose code has a test elsewhere, with more assertions.
ELSEWHERE = {
    "approvals.md": "tests/examples/test_approvals.py",
    "effects.md": "tests/effects/test_docs.py",
    "integrations/claude-agent-sdk.md": "tests/integrations/test_pages.py",
    "integrations/google-adk.md": "tests/integrations/test_pages.py",
    "integrations/cubeloop.md": "tests/integrations/test_cubeloop.py",
    "integrations/langgraph.md": "tests/integrations/test_pages.py",
    "integrations/openai-agents.md": "tests/integrations/test_pages.py",
    "integrations/pydantic-ai.md": "tests/integrations/test_pages.py",
    "sessions.md": "tests/sessions/test_docs.py",
    "tutorial.md": "tests/docs/test_tutorial.py",
    "write-a-backend.md": "tests/docs/test_write_a_backend.py",
}


PAGES = [str(page.relative_to(DOCS)) for page in sorted(DOCS.rglob("*.md"))]
# A whole certification.
LONG = {"certify.md"}
# It sets the provider of metrics of its process, once and for all.
ALONE = {"metrics.md"}
BLOCKS = [
    pytest.param(
        printed_by_process if name in ALONE else printed_by,
        block,
        id=f"{name}-{number}",
        marks=[pytest.mark.long] if name in LONG else [],
    )
    for name in PAGES
    if name not in ELSEWHERE
    for number, block in enumerate(blocks_of(name))
]


@pytest.mark.parametrize(("run", "block"), BLOCKS)
def test_each_block_is_a_program_that_runs(
    run: Callable[[str, Path], str], block: str, tmp_path: Path
) -> None:
    """In an empty folder, without a warning or a failed assertion."""
    run(block, tmp_path)


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_a_page_that_is_tested_elsewhere_has_that_test(page: str, test: str) -> None:
    """The named test file mentions the page."""
    assert Path(page).stem in (ROOT / test).read_text(encoding="utf-8")
    assert page in PAGES


@pytest.mark.long
def test_the_site_builds_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    """A dead link or anchor, or a name that the reference does not find, fails."""
    done = subprocess.run(
        # Not --quiet: then --strict does not count warnings.
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path: Page(path) for path in sorted(tmp_path.rglob("*.html"))}
    dead = [link for page in pages.values() for link in page.dead_links(pages)]
    assert dead == []

    reference = tmp_path / "reference"
    ids = {one for path in reference.glob("*.html") for one in pages[path].ids}
    documented = [
        f"{module.__name__}.{name}"
        for module in (cpkit, cpkit.effects, cpkit.sessions)
        for name in module.__all__
    ]
    documented += [
        f"cpkit.driver.{name}"
        for name, value in vars(cpkit.driver).items()
        if name[0] != "_" and not isinstance(value, ModuleType)
    ]
    # A type of pydantic, and functions that have the names of their modules.
    named = {"cpkit.effects.once", "cpkit.sessions.migrate"}
    assert {*documented} - ids <= {"cpkit.JsonValue", *named}
    assert {"cpkit.effects.once.once", "cpkit.sessions.migrate.migrate"} <= ids
    assert "cpkit.sessions.SessionLog.append_message" in ids  # inherited
    assert "Cancellation" in pages[reference / "contract.html"].terms


def test_terms_of_a_docstring_are_a_definition_list() -> None:
    """Code after ``::`` keeps its form."""
    docstrings = run_path(str(DOCS / "site" / "docstrings.py"))
    text = "One.\n\nTerm\n    What it is,\n    in two lines.\n\n::\n\n    a = 1\n"
    assert docstrings["as_markdown"](text) == (
        "One.\n\n\nTerm\n\n:   What it is,\n    in two lines.\n\n"
        "```python\na = 1\n```\n\n"
    )


class Page(HTMLParser):
    """The links, ids and defined terms of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.terms: set[str] = set()
        self._in_term = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_term = tag == "dt"

        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.links.add(value)

    def handle_data(self, data: str) -> None:
        if self._in_term:
            self.terms.add(data.strip())

    def dead_links(self, pages: Mapping[Path, Page]) -> Iterator[str]:
        """Yield the links within the site that lead to no file, or to no anchor."""
        for link in sorted(self.links):
            url = urlsplit(link)

            if url.scheme or url.netloc or url.path.startswith("/"):
                continue

            target = (self.path.parent / unquote(url.path)).resolve()
            target = target if url.path else self.path
            anchor = unquote(url.fragment)
            page = pages.get(target)

            if not target.exists() or (
                page and anchor not in page.ids | {"", "__skip"}
            ):
                yield f"{self.path.name}: {link}"
