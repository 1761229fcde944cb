"""Histories: what clients did, when, and whether the answers are linearizable."""
