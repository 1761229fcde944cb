"""The benchmarks themselves, and the guard that CI runs."""
