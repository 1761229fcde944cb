"""Run the command without root's rights: ``python -m tests.cli.unprivileged WORDS``."""

from __future__ import annotations

import os

from cpkit import open_checkpointer
from cpkit.cli import app, main

# Import the drivers as root: other users may not be able to read root's Python.
for url in ("sqlite:///x.db", "file:x"):
    open_checkpointer(url)

if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)

assert app
main()
