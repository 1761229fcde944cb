"""What the broken backends are made of: the reference, and a list of what each breaks.

A broken backend is the reference with one promise broken, as small as that can be. It
says which clauses must catch it; the suite's own tests hold it to that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from conformance.harness import FactoryHarness, Harness
from tests.broken.reference import Reference

__all__ = ["BROKEN", "Break", "Broken", "breaks", "pause"]


@dataclass(frozen=True)
class Break:
    """A backend, and a clause that must fail on it.

    ``make`` takes a new folder's path and returns the backend's harness. Where the
    clause fails by its deadline, ``hangs`` is set and it is asked with a short one.
    """

    name: str
    clause: str
    make: Callable[[str], Harness]
    hangs: bool


BROKEN: list[Break] = []

ClassT = TypeVar("ClassT", bound=type)


class Broken(Reference):
    """The reference, one store for all handles of a class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(f"broken {type(self).__qualname__}", **options)


@dataclass
class _InThisProcess(FactoryHarness):
    def elsewhere(self) -> Harness | None:
        return None


def breaks(
    *clauses: str,
    harness: Callable[[str, str], Harness] | None = None,
    hangs: bool = False,
) -> Callable[[ClassT], ClassT]:
    """Say which clauses must catch a class.

    ``harness`` takes the class's dotted name and a folder; without one the class is
    called in this process, with the options of the clause.
    """

    def register(broken: ClassT) -> ClassT:
        dotted = f"{broken.__module__}:{broken.__qualname__}"

        def make(folder: str) -> Harness:
            return harness(dotted, folder) if harness else _InThisProcess(dotted)

        BROKEN.extend(Break(broken.__qualname__, one, make, hangs) for one in clauses)
        return broken

    return register


async def pause() -> None:
    """Let others run, in the middle of what ought to be one step."""
    await asyncio.sleep(0)
