"""A command with a read that never ends: ``python -m tests.cli.interrupted WORD…``.

Prints ``reading`` when it has started.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from cpkit.cli import main
from cpkit.driver import Handle


async def read(*_: Any) -> None:
    sys.stdout.write("reading\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


setattr(Handle, "_read", read)  # noqa: B010  # mypy knows it as a method
main()
