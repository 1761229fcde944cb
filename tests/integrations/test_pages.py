"""The code on the pages of the integrations runs unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import blocks_of, printed_by_process
from tests.stores import fresh_url

PRINTED = {
    "openai-agents": ["I was shown 1 items.\n", "I was shown 3 items.\n"],
    "cubeloop": ["charging 1000\nshown 3\n", "shown 7\n"],
    "pydantic-ai": ["Hello again.\n2 messages\n", "Hello again.\n4 messages\n"],
    "claude-agent-sdk": ["1 entry\n", "1 entry\n"],
    "google-adk": ["I was shown 1 events.\n", "I was shown 3 events.\n"],
    "mcp": ["missed: event 2\n7\n", "missed: event 2\n7\n"],
    "langgraph": ["You said yes. 2\n", "You said yes. 4\n"],
}
URL = "sqlite:///agent.db"


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "page"),
    [
        *(("sqlite", page) for page in PRINTED),
        *zip(["file", "postgres", "redis"], PRINTED, strict=False),
    ],
)
def test_the_program_runs_twice(tmp_path: Path, kind: str, page: str) -> None:
    """The second run continues where the first one ended."""
    program = blocks_of(f"integrations/{page}.md")[0]
    assert URL in program
    program = program.replace(URL, fresh_url(kind, tmp_path))

    for printed in PRINTED[page]:
        assert printed_by_process(program, tmp_path) == printed


@pytest.mark.long
def test_the_later_blocks_run_twice(tmp_path: Path) -> None:
    """Those for programs without a loop, and the others that are not a page's first."""
    graph = blocks_of("integrations/langgraph.md")[1]
    memory = blocks_of("integrations/langgraph.md")[2]
    talk = blocks_of("integrations/pydantic-ai.md")[1]
    program = "\n".join(blocks_of("integrations/openai-agents.md"))

    for count in (1, 3):
        assert printed_by_process(graph, tmp_path) == ""
        assert printed_by_process(memory, tmp_path) == "food {'likes': 'noodles'}\n"
        assert printed_by_process(talk, tmp_path) == f"{count + 1} 1\n"
        assert (
            printed_by_process(program, tmp_path) == f"I was shown {count} items.\n" * 2
        )


@pytest.mark.parametrize("page", PRINTED)
def test_every_block_has_a_test(page: str) -> None:
    """The second block of cubeloop's page is run by its own tests."""
    count = len(blocks_of(f"integrations/{page}.md"))
    more = {"langgraph": 3, "openai-agents": 2, "cubeloop": 2, "pydantic-ai": 2}
    assert count == more.get(page, 1)
