"""Write docs/strangers.md: ``python -m tests.strangers.page``."""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from pathlib import Path

from conformance import Outcome, Status
from tests.strangers.findings import finding, findings, outcomes_of
from tests.strangers.harnesses import STRANGERS
from tests.strangers.servers import placed

__all__ = ["PAGE"]

PAGE = Path(__file__).parents[2] / "docs" / "strangers.md"

HEAD = """\
# What the suite finds in stores of other projects

The suite can certify any store. This page shows its results for five stores that were
not written for cpkit: cubeloop 0.15.3 in memory, on SQLite and on Postgres, and the
sessions of the OpenAI Agents SDK on SQLite and Redis. Small adapters connect them
([`tests/strangers`](../tests/strangers)). These are good stores for what they promise.
The tables list what an agent could *not* rely on if it used them in place of a store
that keeps the contract of cpkit.

Each failed clause of the level *core* is listed with what was seen and with its cause:

- **store**: the store behaves differently from the contract. In most cases the store
  never promised this behaviour.
- **lacks**: the clause needs calls, extra or an append with extra, and the store does
  not have them. Many clauses write messages, extra and calls to check that they are
  independent. A failure of such a clause says nothing about the parts that the store
  has.
- **adapter**: the adapter causes the failure. No store takes an expected version, so
  the adapter loads, compares and then appends. It also converts messages to lists or
  models.

The comparison in the adapter is not atomic, so its `append` is not safe for two
writers. In a run of the level *concurrent*, twelve of twelve tasks that expected the
same version could write (`concurrent.one-wins-a-version`). The adapter causes this too:
only the store itself could check the version atomically. So this page shows the level
*core* only.

`python -m tests.strangers.page` writes this page, and a test compares it with what the
suite finds today. The test leaves out cubeloop on Postgres: when used from another
event loop (`handle.wrong-loop`), it has crashed the interpreter.
"""


def page_of(found: dict[str, list[Outcome]]) -> str:
    """Return the page's text."""
    lines = [
        HEAD,
        "| Store | Passed | Store | Lacks | Adapter | Not checked |",
        "|---|---:|---:|---:|---:|---:|",
    ]

    for kind, outcomes in found.items():
        passed = sum(one.status is Status.PASSED for one in outcomes)
        kinds = list(findings(outcomes).values())
        counts = [passed, *(kinds.count(k) for k in ("store", "lacks", "adapter"))]
        counts.append(len(outcomes) - passed - len(kinds))
        lines.append(f"| {kind} | {' | '.join(map(str, counts))} |")

    for kind, outcomes in found.items():
        failed = [one for one in outcomes if one.status is Status.FAILED]
        lacks = [one.clause.id for one in failed if finding(one) == "lacks"]
        lines += [
            "",
            f"## {kind}",
            "",
            "| Clause | Cause | What the contract says | Seen |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| `{one.clause.id}` | {finding(one)} | {_cell(one.clause.sentence)} "
            f"| {_seen(one)} |"
            for one in failed
            if finding(one) != "lacks"
        ]
        lines += [
            "",
            f"Lacks a part that these need: {', '.join(f'`{i}`' for i in lacks)}.",
        ]

    return "\n".join(lines) + "\n"


def _seen(outcome: Outcome) -> str:
    """Return what was seen, without random ids and memory addresses."""
    seen = re.sub(r"-[0-9a-f]{16,32}", "-…", outcome.seen)
    return _cell(re.sub(r" at 0x[0-9a-f]+", "", seen))


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= 120 else text[:119] + "…"


async def _all() -> dict[str, list[Outcome]]:
    found = {}

    for kind in STRANGERS:
        with tempfile.TemporaryDirectory() as folder:
            harness = await placed(kind, Path(folder))
            found[kind] = await outcomes_of(harness)

        sys.stderr.write(f"{kind}: {len(found[kind])} clauses\n")

    return found


if __name__ == "__main__":
    PAGE.write_text(page_of(asyncio.run(_all())), encoding="utf-8")
