"""The suite as a pytest class: inherit it and define the fixture ``harness``.

::

    class TestMyStore(ConformanceTests):
        @pytest.fixture
        def harness(self, tmp_path):
            return MyHarness(str(tmp_path / "store"))

Each clause is a test with its id as the name; no asyncio plugin is needed. The
environment variables ``CPKIT_SEED`` and ``CPKIT_ROUNDS`` set the seed of random choices
and scale the slow clauses.
"""

from __future__ import annotations

import os
from typing import ClassVar
from zlib import crc32

import pytest

from conformance.catalog import all_clauses
from conformance.clause import Clause
from conformance.failure import Skip
from conformance.harness import Harness
from conformance.runner import Patience, perform

__all__ = ["ConformanceTests"]


_PATIENCE: dict[type, Patience] = {}
"""How each class waits for a store that hung."""


class ConformanceTests:
    """Runs every clause as a separate test."""

    rounds: ClassVar[float] = float(os.environ.get("CPKIT_ROUNDS") or 1)

    @pytest.fixture
    def harness(self) -> Harness:
        """Return the harness of the store; a subclass must define this."""
        raise NotImplementedError("define a fixture 'harness' in your test class")

    @pytest.mark.parametrize("clause", all_clauses(), ids=lambda clause: clause.id)
    def test_clause(self, clause: Clause, harness: Harness) -> None:
        """Check one clause of the contract."""
        __tracebackhide__ = True
        seed = int(os.environ.get("CPKIT_SEED") or crc32(os.urandom(4)))

        try:
            perform(
                clause,
                harness,
                seed=seed,
                rounds=self.rounds,
                patience=_PATIENCE.setdefault(type(self), Patience()),
            )
        except Skip as exc:
            pytest.skip(str(exc))
        except Exception as exc:
            exc.add_note(
                f"{clause.id}: {clause.sentence}\nagain with CPKIT_SEED={seed}"
            )
            raise
