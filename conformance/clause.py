"""What a clause is, and how a check becomes one.

A clause is one fact of the contract: a stable id, one sentence (the docstring), and a
function that checks it with plain ``assert``. The function takes a `Case`, which hands
it an open store and fresh ids. So a clause depends neither on other clauses nor on
what the store already holds.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from conformance.case import Case

__all__ = ["REGISTERED", "Check", "Clause", "Level", "clause"]


class Level(StrEnum):
    """What a group of clauses proves."""

    CORE = "core"
    OPTIONAL = "optional"
    CONCURRENT = "concurrent"
    DURABLE = "durable"
    BOUNDED = "bounded"
    POWERLOSS = "powerloss"
    REPLICATED = "replicated"


Check = Callable[[Case], Awaitable[None] | None]
CheckT = TypeVar("CheckT", bound=Check)


@dataclass(frozen=True)
class Clause:
    """One fact of the contract, and the function that checks it.

    ``needs`` are requirements: optional protocols (a store that lacks one is
    *unsupported*) and names of harness abilities (if one is missing, the clause is
    *skipped*). ``deadline`` is in seconds, for one round on an idle machine.
    """

    id: str
    sentence: str
    level: Level
    needs: tuple[type | str, ...]
    deadline: float
    check: Check

    @property
    def subject(self) -> str:
        return self.id.partition(".")[0]

    @property
    def protocols(self) -> list[type]:
        """The optional protocols that the store must implement."""
        return [need for need in self.needs if isinstance(need, type)]

    @property
    def abilities(self) -> list[str]:
        """What the harness must be able to do."""
        return [need for need in self.needs if isinstance(need, str)]

    @property
    def runs_own_loops(self) -> bool:
        """Whether the check is a plain function, which starts its own event loops."""
        return not inspect.iscoroutinefunction(self.check)


REGISTERED: dict[str, Clause] = {}
"""Clauses by id; `clause` adds to it."""


def clause(
    clause_id: str,
    *needs: type | str,
    level: Level | None = None,
    deadline: float = 20,
) -> Callable[[CheckT], CheckT]:
    """Register a check under a stable id; its docstring is the clause's sentence.

    Without a level, a clause that needs a protocol is *optional* and any other is
    *core*.
    """

    def register(check: CheckT) -> CheckT:
        sentence = inspect.getdoc(check)
        assert sentence, f"the check of {clause_id} has no docstring"
        assert clause_id not in REGISTERED, f"{clause_id} is registered twice"
        optional = any(isinstance(need, type) for need in needs)
        REGISTERED[clause_id] = Clause(
            clause_id,
            " ".join(sentence.split()),
            level or (Level.OPTIONAL if optional else Level.CORE),
            needs,
            deadline,
            check,
        )
        return check

    return register
