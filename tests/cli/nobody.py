"""The command without root's rights: ``python -m tests.cli.nobody WORDS``."""

from __future__ import annotations

import os

from cpkit import open_checkpointer
from cpkit.cli import app, main

# What is needed is imported while it may be: root's Python can be closed to others.
for url in ("sqlite:///x.db", "file:x"):
    open_checkpointer(url)

if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)

assert app
main()
