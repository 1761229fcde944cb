"""The layers of an operation can all be measured."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from benchmarks.layers import decoding, layers
from cpkit.tools.benchmark import Contender, Scale, Stored, interleaved

pytestmark = pytest.mark.long


@pytest.mark.parametrize("driver", ["sqlite", "postgres", "redis", "file"])
async def test_an_append_and_a_replay_have_layers(
    pair: tuple[Contender, Contender],
) -> None:
    """From the floor to the public method, without an error."""
    floor, ours = pair
    assert isinstance(ours, Stored)

    async with AsyncExitStack() as stack:
        trials = await layers(floor, ours.url, Scale(operations=3, seconds=0.2), stack)
        found = await interleaved(trials, 1)

    assert [result.error for result in found] == [None] * len(found)

    for workload, last in (
        ("one append", "append()"),
        ("one replay", "find_completed()"),
    ):
        names = [result.name for result in found if result.workload == workload]
        assert names[0] == "floor"
        assert names[-1] == last
        assert len(names) >= 3


def test_every_way_of_decoding_is_timed() -> None:
    """The times are in seconds per message."""
    assert all(0 < took < 0.001 for took in decoding(1).values())
