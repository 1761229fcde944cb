"""Stores of other projects, adapted to the contract and certified."""
