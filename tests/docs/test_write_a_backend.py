"""The tutorial quotes the example and the kit exactly."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "write-a-backend.md").read_text()
EXAMPLE = "\n".join(
    path.read_text()
    for path in (
        ROOT / "cpkit" / "driver" / "key_value.py",
        *sorted((ROOT / "examples" / "custom_backend").rglob("*")),
    )
    if path.suffix in (".py", ".toml")
)


@pytest.mark.parametrize(
    "block", re.findall(r"```(?:python|toml)\n(.*?)```", PAGE, flags=re.DOTALL)
)
def test_each_block_is_in_the_example(block: str) -> None:
    """A reader copies the same code that CI certifies."""
    assert textwrap.dedent(block).strip() in textwrap.dedent(EXAMPLE) or (
        block.rstrip() in EXAMPLE
    )
