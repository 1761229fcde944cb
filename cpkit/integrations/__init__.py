"""Adapters: frameworks that keep their state in any cpkit store."""
