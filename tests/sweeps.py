"""Sweeps of which ``make test`` runs a part, and ``make test-long`` the rest."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

__all__ = ["sweep"]


def sweep(values: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Return the values as parameters of a test; those not in ``quick`` are long."""
    return [
        pytest.param(value, marks=() if value in quick else pytest.mark.long)
        for value in values
    ]
