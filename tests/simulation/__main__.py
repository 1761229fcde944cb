"""Run one seed and print its history: ``python -m tests.simulation 229``."""

from __future__ import annotations

import sys

from tests.simulation.scenario import simulate

history = simulate(int(sys.argv[1]))
sys.stdout.write(f"{history}\n")
sys.exit(bool(history.violations))
