"""The state machine reports a difference as a short script."""

from __future__ import annotations

import pytest

from conformance import FactoryHarness, Status, run_clause, select


@pytest.mark.long
def test_a_difference_is_shown_as_a_script() -> None:
    """The script has only the calls that are needed for the difference."""
    (model,) = select(ids=["model"])
    harness = FactoryHarness("tests.broken.extras:ReplacesExtra")
    outcome = run_clause(model, harness, seed=1)
    assert outcome.status is Status.FAILED
    assert outcome.expected != outcome.seen
    save, save_again, load = outcome.where.splitlines()
    assert "await cp.save_extra('" in save
    assert "await cp.save_extra('" in save_again
    assert "await cp.load('" in load
