"""Errors of the saver, beside those of the store."""

from __future__ import annotations

from cpkit.errors import CheckpointerError

__all__ = ["Unsupported"]


class Unsupported(CheckpointerError, NotImplementedError):
    """The store lacks the optional ability that a method of the saver needs."""

    def __init__(self, method: str, ability: str) -> None:
        super().__init__(method, ability)
        self.method = method
        self.ability = ability

    def __str__(self) -> str:
        return (
            f"{self.method} needs a store that has {self.ability}; every store that "
            "comes with cpkit has it"
        )
