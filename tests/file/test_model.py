"""The store does what the store in memory does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cpkit.driver import Outcome, Write
from cpkit_file import FileStore
from tests.model import check_outcomes
from tests.sweeps import sweep


class _OneByOne(FileStore):
    """Commits each write alone, as the handle does after a batch was refused."""

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        alone = [await super(_OneByOne, self).commit([one]) for one in batch]
        return [outcome for (outcome,) in alone]


@pytest.mark.filterwarnings("ignore:.*is in memory")
@pytest.mark.parametrize("seed", sweep(range(20), range(2)))
async def test_every_outcome_is_that_of_the_store_in_memory(
    tmp_path: Path, seed: int
) -> None:
    """Random writes give equal outcomes, and leave equal states."""
    await check_outcomes(_OneByOne(str(tmp_path)), seed)
