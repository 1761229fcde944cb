"""Run the command without root's rights: ``python -m tests.cli.unprivileged WORDS``."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  # asyncio imports it late
import os
import sys

from typer.testing import CliRunner

from cpkit.cli import main
from cpkit.cli.app import app_for

# A rehearsal as root imports every module: other users may not be able to read root's
# Python, or a checkout that only its owner may enter.
for url in ("sqlite:////nowhere/x.db", "file:///nowhere/x"):
    words = [sys.argv[1], url]
    CliRunner().invoke(app_for(words), words)

if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)

main()
