"""Errors of the saver, beside those of the store."""

from __future__ import annotations

from cpkit.errors import CheckpointerError

__all__ = ["NotOwner", "TypeRefused", "Unsupported"]


class TypeRefused(CheckpointerError, TypeError):
    """Stored data names a type that the saver may not load."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        module, _, name = self.name.rpartition(".")
        return (
            f"the stored type {self.name[:200]} is not allowed: import {module[:200]} "
            "before the thread is read, or pass serde=JsonPlusSerializer("
            f"allowed_msgpack_modules=[({module[:200]!r}, {name[:200]!r})])"
        )


class NotOwner(CheckpointerError):
    """Another run has claimed the thread; nothing was written."""

    def __init__(self, thread_id: str, token: str) -> None:
        super().__init__(thread_id, token)
        self.thread_id = thread_id
        self.token = token

    def __str__(self) -> str:
        return (
            f"the run {self.token[:8]} does not own thread {self.thread_id[:80]!r}: "
            "another run has claimed it, or it was deleted; stop this run"
        )


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
