"""Tests of the SQLite store that the conformance suite cannot make."""
