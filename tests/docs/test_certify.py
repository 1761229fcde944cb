"""The harness of docs/certify.md runs, and power losses of its server are judged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.docs.pages import blocks_of, printed_by_process

POWER_LOSS = """
import asyncio, tempfile

from conformance import certify
from my_harness import MyHarness


async def main():
    harness = MyHarness(tempfile.mkdtemp())
    await harness.start()

    try:
        clause = "powerloss.acknowledged-survives"
        report = await certify(harness, clauses=[clause], rounds=0.1)
        print(report.survived, report.unasked)
    finally:
        await harness.kill()


asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.skipif(
    not (shutil.which("redis-server") and shutil.which("strace")),
    reason="needs redis-server and strace",
)
def test_the_harness_of_a_server_runs(tmp_path: Path) -> None:
    """The page's program certifies its server, and the level powerloss judges it."""
    (block,) = blocks_of("certify.md")
    assert printed_by_process(block, tmp_path).split() == ["holds", "holds"]
    (tmp_path / "my_harness.py").write_text(block, encoding="utf-8")
    assert printed_by_process(POWER_LOSS, tmp_path).split() == ["machine", "{}"]
