"""The suite that certifies any backend of cpkit.

Use it in one of three ways: inherit `ConformanceTests` in pytest, run ``cpkit certify
URL``, or call ``await certify(url_or_harness)``. The author of a backend supplies a
`Harness`, or only a URL.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if "pytest" in sys.modules:
    import pytest

    # Before the clauses are imported, so that pytest shows the values in their asserts.
    pytest.register_assert_rewrite("conformance.clauses")

from conformance.clause import Clause, Level, clause  # first: `clause` is a module too
from cpkit.registry import needs_extra

if TYPE_CHECKING:
    from conformance.catalog import all_clauses, select
    from conformance.certification import Certification, certify
    from conformance.failure import Failure, Skip
    from conformance.harness import FactoryHarness, Harness, URLHarness, harness_for
    from conformance.nodes import Nodes
    from conformance.report import SUITE_VERSION, Report
    from conformance.runner import Outcome, Status, run_clause
    from conformance.server import ServerHarness, ServerNodes
    from conformance.testing import ConformanceTests

__all__ = [
    "SUITE_VERSION",
    "Certification",
    "Clause",
    "ConformanceTests",
    "Failure",
    "FactoryHarness",
    "Harness",
    "Level",
    "Nodes",
    "Outcome",
    "Report",
    "ServerHarness",
    "ServerNodes",
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

_MODULES = {
    "catalog": ("all_clauses", "select"),
    "certification": ("Certification", "certify"),
    "failure": ("Failure", "Skip"),
    "harness": ("FactoryHarness", "Harness", "URLHarness", "harness_for"),
    "nodes": ("Nodes",),
    "report": ("SUITE_VERSION", "Report"),
    "runner": ("Outcome", "Status", "run_clause"),
    "server": ("ServerHarness", "ServerNodes"),
    "testing": ("ConformanceTests",),
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use.

    The worker processes of the suite import neither pytest, Hypothesis nor the clauses,
    so they start in less than half the time.
    """
    for module, names in _MODULES.items():
        if name in names:
            with needs_extra("conformance", "conformance"):
                return getattr(importlib.import_module(f"conformance.{module}"), name)

    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
