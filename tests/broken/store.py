"""The base class of the broken backends, and the list of clauses that each one breaks.

A broken backend is a small subclass of the reference that breaks one promise. It names
the clauses that must fail on it; tests/conformance_suite checks that they do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from conformance.harness import FactoryHarness, Harness
from cpkit import Durability, Survives, open_checkpointer
from cpkit.driver import Handle
from tests.broken.reference import Reference

__all__ = ["BROKEN", "AtOnce", "Break", "Broken", "breaks", "pause", "promising"]


@dataclass(frozen=True)
class Break:
    """A backend, and a clause that must fail on it.

    ``make`` takes the path of a new folder and returns the backend's harness. If
    ``hangs`` is true, the clause fails by its deadline, and the test shortens that.
    ``raises`` is the type of an error that the backend raises where it must not.
    Without both, what the clause checks does not hold.
    """

    name: str
    clause: str
    make: Callable[[str], Harness]
    hangs: bool
    raises: str


BROKEN: list[Break] = []

OpenT = TypeVar("OpenT", bound=Callable[..., Any])


class Broken(Reference):
    """The reference; all handles of one class share one store."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            f"{type(self).__module__}.{type(self).__qualname__}", **options
        )


class AtOnce(Broken):
    """Yields to other tasks only where a subclass pauses."""

    async def _begin(self) -> None:
        self._check_usable()


@dataclass
class _InThisProcess(FactoryHarness):
    def elsewhere(self) -> Harness | None:
        return None


def breaks(
    *clauses: str,
    harness: Callable[[str, str], Harness] | None = None,
    hangs: bool = False,
    raises: str = "",
) -> Callable[[OpenT], OpenT]:
    """Register the clauses that must fail on a class, or a function that opens handles.

    ``harness`` takes the dotted name of the class and a folder. Without it handles are
    opened in this process only.
    """

    def register(broken: OpenT) -> OpenT:
        dotted = f"{broken.__module__}:{broken.__qualname__}"

        def make(folder: str) -> Harness:
            return harness(dotted, folder) if harness else _InThisProcess(dotted)

        name = broken.__qualname__
        BROKEN.extend(Break(name, one, make, hangs, raises) for one in clauses)
        return broken

    return register


async def pause() -> None:
    """Yield to other tasks, in the middle of an operation that must be atomic."""
    await asyncio.sleep(0)


def promising(url: str, **options: Any) -> Handle[Any]:
    """Return an unopened handle of a store that promises to survive a power loss."""
    opened: Any = open_checkpointer(url, **options)
    handle: Handle[Any] = opened
    handle.store.durability = lambda: Durability(Survives.MACHINE)  # type: ignore[method-assign]  # the point
    return handle
