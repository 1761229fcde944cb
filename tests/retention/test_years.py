"""A thread that is pruned all the time stays small, while others write and read it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cpkit import open_checkpointer
from tests.processes import Worker
from tests.stores import SHARED, fresh_url

SECONDS = float(os.environ.get("CPKIT_YEARS_SECONDS", "8"))
LEFT = 200


@pytest.mark.long
@pytest.mark.timeout(60 + 3 * SECONDS)
@pytest.mark.parametrize("kind", SHARED)
async def test_three_processes_keep_a_thread_small(kind: str, tmp_path: Path) -> None:
    """One appends, one loads and one prunes: nothing is lost, and only old ones go.

    The prune is fenced, so it comes through between two appends.
    """
    url = fresh_url(kind, tmp_path)
    workers = [Worker("tests.retention.years") for _ in range(3)]

    try:
        workers[0].tell("append_for", url, SECONDS)
        workers[1].tell("load_for", url, SECONDS)
        workers[2].tell("prune_for", url, SECONDS + 2, LEFT)
        version, most, gone = (one.answer() for one in workers)
    finally:
        for one in workers:
            one.close()

    opened: Any = open_checkpointer(url)

    async with opened as cp:
        data = await cp.load("t")

    assert (data.version, data.first) == (version, gone)
    assert len(data.messages) == LEFT
    assert [one["n"] for one in data.messages] == [*range(gone, version)]
    assert most
