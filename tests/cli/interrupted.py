"""``cpkit show`` with a load that never ends: ``python -m tests.cli.interrupted URL``.

Prints ``loading`` when the load has started.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from cpkit.cli import main
from cpkit.driver import Handle


async def load(_self: Any, _thread_id: str) -> None:
    sys.stdout.write("loading\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


setattr(Handle, "load", load)  # noqa: B010  # mypy knows it as a method
sys.argv = ["cpkit", "show", sys.argv[1], "t"]
main()
