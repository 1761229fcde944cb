"""What a clause is, and the list of all of them.

A clause is one fact of the contract: a stable id, one sentence (its docstring), and a
function that checks it with plain ``assert``. The function takes a `Case`, which hands
it an open store and fresh ids, so no clause depends on another or on what the store
already holds.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from conformance.case import Case

__all__ = ["Clause", "Level", "Skip", "all_clauses", "clause", "select"]


class Level(StrEnum):
    """What a group of clauses proves; see DESIGN.md, section 3."""

    CORE = "core"
    OPTIONAL = "optional"
    CONCURRENT = "concurrent"
    DURABLE = "durable"
    BOUNDED = "bounded"


class Skip(Exception):
    """A clause cannot be asked here; the message says why."""


Check = Callable[["Case"], Awaitable[None] | None]
CheckT = TypeVar("CheckT", bound=Check)


@dataclass(frozen=True)
class Clause:
    """One fact of the contract, and the function that checks it.

    ``needs`` are what must be there for the clause to be asked: optional protocols (a
    store without one is *unsupported*) and names of harness abilities (without one the
    clause is *skipped*). ``deadline`` is in seconds, for one round.
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
        """The optional protocols that the store must have."""
        return [need for need in self.needs if isinstance(need, type)]

    @property
    def abilities(self) -> list[str]:
        """What the harness must be able to do."""
        return [need for need in self.needs if isinstance(need, str)]


_clauses: dict[str, Clause] = {}


def clause(
    clause_id: str,
    *needs: type | str,
    level: Level | None = None,
    deadline: float = 20,
) -> Callable[[CheckT], CheckT]:
    """Register a check under a stable id; its docstring is the clause's sentence.

    The level is *optional* where a protocol is needed and *core* where none is, unless
    one is given.
    """

    def register(check: CheckT) -> CheckT:
        sentence = inspect.getdoc(check)
        assert sentence, f"{clause_id} has no sentence"
        assert clause_id not in _clauses, f"{clause_id} is there twice"
        optional = any(isinstance(need, type) for need in needs)
        _clauses[clause_id] = Clause(
            clause_id,
            " ".join(sentence.split()),
            level or (Level.OPTIONAL if optional else Level.CORE),
            needs,
            deadline,
            check,
        )
        return check

    return register


def all_clauses() -> list[Clause]:
    """Return every clause, by level and then in the order of the contract."""
    import conformance.clauses  # noqa: F401  # registers them; late, or it is a circle

    order = list(Level)
    return sorted(_clauses.values(), key=lambda found: order.index(found.level))


def select(levels: Sequence[str] = (), ids: Sequence[str] = ()) -> list[Clause]:
    """Return the clauses of the levels, or those of the ids.

    An id may be a subject (``append``) and then stands for all of its clauses. Raises
    ``ValueError`` for a name that there is not, and where nothing is left.
    """
    found = all_clauses()
    unknown = {*levels} - {*Level}

    if unknown:
        raise ValueError(
            f"no level {', '.join(sorted(unknown))}; there are {', '.join(Level)}"
        )

    for wanted in ids:
        if not any(wanted in (one.id, one.subject) for one in found):
            raise ValueError(f"no clause {wanted!r}")

    chosen = [
        one
        for one in found
        if (not levels or one.level in levels)
        and (not ids or one.id in ids or one.subject in ids)
    ]

    if not chosen:
        raise ValueError("none of these clauses is of these levels")

    return chosen


def is_sync(check: Callable[..., Any]) -> bool:
    """Tell whether a check runs its own event loops."""
    return not inspect.iscoroutinefunction(check)
