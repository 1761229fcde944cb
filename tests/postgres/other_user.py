"""Open a store as another user: ``python -m tests.postgres.other_user URL``."""

from __future__ import annotations

import asyncio
import os
import sys

from cpkit import open_checkpointer


async def main(url: str) -> None:
    """Try it as root first, which imports every module: others may not read them."""
    for is_root in (True, False):
        try:
            async with open_checkpointer(url, connect_timeout=0.05):
                sys.stdout.write("opened\n")
        except Exception as exc:
            sys.stdout.write(f"{exc}\n")

        if is_root:
            os.setgid(65534)
            os.setuid(65534)
            sys.stdout.write("as another user\n")


asyncio.run(main(sys.argv[1]))
