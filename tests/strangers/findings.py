"""Say what the suite finds in a stranger: ``-m tests.strangers.findings KIND WHERE``.

Each is certified in a process of its own, because a store that is used in ways that it
was not made for can hang its event loop for good, or crash the interpreter.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable

from conformance import Outcome, Status, certify
from tests.strangers.harnesses import Stranger

__all__ = ["finding", "findings", "outcomes_of"]

# The adapter compares versions, makes a list or a model of what it is given, and does
# so before the store sees anything.
ADAPTERS = {
    "append.expected-version-is-a-count",
    "append.takes-a-sequence-only",
    "ids.refused-first",
    "values.message-is-an-object",
}


async def outcomes_of(stranger: Stranger) -> list[Outcome]:
    """Certify a stranger at the level core."""
    return (await certify(stranger, levels=["core"], seed=1)).outcomes


def finding(outcome: Outcome) -> str:
    """Return whose a failure is: the store's, the adapter's, or nobody's."""
    if outcome.clause.id in ADAPTERS:
        return "adapter"

    if _is_caused_by(outcome.error, NotImplementedError):
        return "lacks"

    return "store"


def findings(outcomes: Iterable[Outcome]) -> dict[str, str]:
    """Return whose each failure is, by the id of the clause."""
    return {
        outcome.clause.id: finding(outcome)
        for outcome in outcomes
        if outcome.status is Status.FAILED
    }


def _is_caused_by(error: BaseException | None, kind: type[BaseException]) -> bool:
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__

    return error is not None


if __name__ == "__main__":
    kind, *where = sys.argv[1:]
    found = asyncio.run(outcomes_of(Stranger(kind, where)))
    sys.stdout.write(json.dumps(findings(found)))
