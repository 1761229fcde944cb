"""cpkit measured against floors and peers in one run: ``python -m benchmarks``."""
