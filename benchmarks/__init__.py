"""cpkit beside its floors and its peers, in one run: ``python -m benchmarks``."""
