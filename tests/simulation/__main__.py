"""Run one seed and print its history; exit with 1 if it has violations.

::

    python -m tests.simulation 229         effects
    python -m tests.simulation lease 229   leases
    python -m tests.simulation worker 229  workers
"""

from __future__ import annotations

import sys

from tests.simulation.leases import simulate_lease
from tests.simulation.scenario import simulate
from tests.simulation.workers import simulate_worker

KINDS = {"effect": simulate, "lease": simulate_lease, "worker": simulate_worker}

*kind, seed = sys.argv[1:]
history = KINDS[kind[0] if kind else "effect"](int(seed))
sys.stdout.write(f"{history}\n")
sys.exit(bool(history.violations))
