"""The code on the pages of the integrations runs unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import blocks_of, printed_by

PRINTED = {
    "openai-agents": ["I was shown 1 items.\n", "I was shown 3 items.\n"],
    "cubepi": ["charging 1000\nshown 3\n", "shown 7\n"],
    "pydantic-ai": ["Hello again.\n2 messages\n", "Hello again.\n4 messages\n"],
}


@pytest.mark.parametrize("page", PRINTED)
def test_the_program_runs_twice(tmp_path: Path, page: str) -> None:
    """The second run continues where the first one ended."""
    program = blocks_of(f"integrations/{page}.md")[0]

    for printed in PRINTED[page]:
        assert printed_by(program, tmp_path) == printed


@pytest.mark.parametrize("page", PRINTED)
def test_every_block_has_a_test(page: str) -> None:
    """Only CubePi's page has a second block, which its own tests run."""
    count = len(blocks_of(f"integrations/{page}.md"))
    assert count == (2 if page == "cubepi" else 1)
