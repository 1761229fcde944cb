"""Print what the suite finds in a store: ``-m tests.strangers.findings KIND WHERE``.

Each store is certified in a separate process. These stores were not made for such use:
they can block the event loop forever, or crash the interpreter.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable

from conformance import Outcome, Status, certify
from tests.strangers.harnesses import Stranger

__all__ = ["finding", "findings", "outcomes_of"]

# Failures caused by the adapter: it compares versions, and converts messages to lists
# or models, before it calls the store.
ADAPTERS = {
    "append.expected-version-is-a-count",
    "append.takes-a-sequence-only",
    "ids.refused-first",
    "values.message-is-an-object",
}


async def outcomes_of(stranger: Stranger) -> list[Outcome]:
    """Certify a store at the level core."""
    return (await certify(stranger, levels=["core"], seed=1)).outcomes


def finding(outcome: Outcome) -> str:
    """Return the cause of a failure: ``store``, ``adapter`` or ``lacks``."""
    if outcome.clause.id in ADAPTERS:
        return "adapter"

    if _is_caused_by(outcome.error, NotImplementedError):
        return "lacks"

    return "store"


def findings(outcomes: Iterable[Outcome]) -> dict[str, str]:
    """Return the cause of each failure, by the id of the clause."""
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
