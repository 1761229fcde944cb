"""The code in docs/integrations/langgraph.md runs unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import blocks_of, printed_by

BLOCKS = blocks_of("integrations/langgraph.md")

# The output of each program in its first run, and in its second.
PRINTED = [["You said yes. 2\n", "You said yes. 4\n"], ["", ""]]


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_each_program_runs_twice(tmp_path: Path, number: int) -> None:
    """The second run continues where the first one ended."""
    for printed in PRINTED[number]:
        assert printed_by(BLOCKS[number], tmp_path) == printed
