"""The list of runs, and how one process waits for another.

``threads`` says what is stored for a run, and ``waiting`` how leases, workers and
effects find out that a runner has ended, or has died.
"""
