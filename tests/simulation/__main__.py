"""Run one seed and print its history; exit with 1 if it has violations.

::

    python -m tests.simulation 229         effects
    python -m tests.simulation lease 229   leases
"""

from __future__ import annotations

import sys

from tests.simulation.leases import simulate_lease
from tests.simulation.scenario import simulate

*kind, seed = sys.argv[1:]
history = simulate_lease(int(seed)) if kind == ["lease"] else simulate(int(seed))
sys.stdout.write(f"{history}\n")
sys.exit(bool(history.violations))
