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
# What the suite found in other people's stores

The suite is for any store, so it was let loose on five that were not written for it,
with adapters that add nothing ([`tests/strangers`](../tests/strangers)): CubePi 0.13.6
in memory, on SQLite and on Postgres, and the sessions of the OpenAI Agents SDK on
SQLite and Redis. These are good stores for what they promise. The table says what an
agent could *not* rely on if it took them for the contract of cpkit.

Each clause that failed at the level *core* is listed with what was seen, and with whose
it is:

- **store**: the store does otherwise than the contract says, which it often never
  promised.
- **lacks**: the clause needs calls or extra, and the store has none. Many clauses write
  all three to see that they leave each other alone; these say nothing about the rest.
- **adapter**: our adapter is at fault. No store takes an expected version, so the
  adapter loads, compares and then appends; and it makes a model or a list of what it is
  given.

The same comparison makes the adapters' `append` unsafe for two writers: in a run of the
level *concurrent*, all twelve of twelve tasks that expected one version were let in
(`concurrent.one-wins-a-version`). That is the adapters' fault as well, because a fence
must be the store's own, and so the page stops at *core*.

`python -m tests.strangers.page` writes this page again; a test holds it to what the
suite says today. CubePi on Postgres is left out of that test: used from another event
loop (`handle.wrong-loop`) it has crashed the interpreter.
"""


def page_of(found: dict[str, list[Outcome]]) -> str:
    """Return the page's text."""
    lines = [
        HEAD,
        "| Store | Holds | Store | Lacks | Adapter | Not asked |",
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
            "| Clause | Whose | What the contract says | Seen |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| `{one.clause.id}` | {finding(one)} | {_cell(one.clause.sentence)} "
            f"| {_seen(one)} |"
            for one in failed
            if finding(one) != "lacks"
        ]
        lines += ["", f"Lacks what these need: {', '.join(f'`{i}`' for i in lacks)}."]

    return "\n".join(lines) + "\n"


def _seen(outcome: Outcome) -> str:
    """Return what was seen, without what chance or this machine made up."""
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
