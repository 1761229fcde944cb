"""LangGraph's own conformance suite, on every store."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.conformance import checkpointer_test, validate

from cpkit import open_checkpointer
from cpkit.integrations.langgraph import CheckpointSaver


async def test_every_capability_is_full(url: str) -> None:
    """Every capability of the suite passes; none is skipped."""

    @checkpointer_test(name=url)
    async def saver() -> AsyncGenerator[BaseCheckpointSaver[str], None]:
        async with open_checkpointer(url) as cp:
            yield CheckpointSaver(cp)

    report = await validate(saver)
    results = report.to_dict()["results"].items()
    assert {name: one["failures"] for name, one in results if one["failures"]} == {}
    assert all(one["detected"] and one["passed"] for _, one in results)
    assert report.conformance_level() == "FULL"
