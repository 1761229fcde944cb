"""The backend keeps the contract, clause by clause."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance import ConformanceTests, URLHarness


class TestLMDB(ConformanceTests):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> URLHarness:
        return URLHarness(f"lmdb://{tmp_path}")
