"""Simulates effects, leases and workers, in thousands of seeded schedules."""
