"""Sweeps of which ``make test`` runs a part, and ``make test-long`` the rest."""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import product
from typing import Any

import pytest

__all__ = ["sweep", "table"]


def sweep(values: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Return the values as parameters of a test; those not in ``quick`` are long."""
    return [
        pytest.param(value, marks=() if value in quick else pytest.mark.long)
        for value in values
    ]


def table(rows: Iterable[Any], columns: Iterable[Any]) -> list[Any]:
    """Return all pairs as parameters; those off each fourth diagonal are long.

    So ``make test`` has a part of each row and of each column.
    """
    pairs = product(enumerate(rows), enumerate(columns))
    return [
        pytest.param(row, column, marks=() if (n - m) % 4 == 0 else pytest.mark.long)
        for (n, row), (m, column) in pairs
    ]
