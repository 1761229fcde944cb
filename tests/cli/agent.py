"""An agent that waits for approval: ``python -m tests.cli.agent URL THREAD AMOUNT``.

Prints ``asked KEY`` when the request is stored, and ``ran`` or ``denied`` afterwards.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from cpkit import open_checkpointer
from cpkit.effects import Effect, EffectDenied, EffectLedger


async def main(url: str, thread_id: str, amount: int) -> None:
    async with open_checkpointer(url) as cp:
        ledger = EffectLedger(
            cp,
            requires_approval=lambda _: True,
            on_approval_required=lambda effect: say(f"asked {effect.key}"),
        )

        try:
            said = await ledger.run(thread_id, "wire", {"amount": amount}, wire)
            say(f"ran {said}")
        except EffectDenied as exc:
            say(f"denied: {exc.reason}")


def wire(effect: Effect) -> Any:
    return effect.args["amount"]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
