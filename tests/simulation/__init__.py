"""Simulates effects and leases, in thousands of seeded schedules."""
