"""The suite that certifies any backend of cpkit.

Use it in one of three ways: inherit `ConformanceTests` in pytest, run ``cpkit certify
URL``, or call ``await certify(url_or_harness)``. The author of a backend supplies a
`Harness`, or only a URL.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if "pytest" in sys.modules:
    import pytest

    # Before the clauses are imported, so that pytest shows the values in their asserts.
    pytest.register_assert_rewrite("conformance.clauses")

from conformance.catalog import all_clauses, select
from conformance.certify import certify
from conformance.clause import Clause, Level, clause
from conformance.failure import Failure, Skip
from conformance.harness import FactoryHarness, Harness, URLHarness, harness_for
from conformance.report import SUITE_VERSION, Report
from conformance.runner import Outcome, Status, run_clause

if TYPE_CHECKING:
    from conformance.testing import ConformanceTests

__all__ = [
    "SUITE_VERSION",
    "Clause",
    "ConformanceTests",
    "FactoryHarness",
    "Failure",
    "Harness",
    "Level",
    "Outcome",
    "Report",
    "Skip",
    "Status",
    "URLHarness",
    "all_clauses",
    "certify",
    "clause",
    "harness_for",
    "run_clause",
    "select",
]


def __getattr__(name: str) -> Any:
    """Import pytest only if it is needed: worker processes do without it."""
    if name == "ConformanceTests":
        from conformance.testing import ConformanceTests

        return ConformanceTests

    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
