"""Checkpoints of LangGraph, read from the tables of its SQLite and Postgres savers.

They become what `cpkit.integrations.langgraph.CheckpointSaver` reads under the same
thread id. Needs ``pip install 'cpkit[langgraph]'``.
"""

from cpkit.tools.importing.langgraph.read import (
    read_langgraph_postgres,
    read_langgraph_sqlite,
)

__all__ = ["read_langgraph_postgres", "read_langgraph_sqlite"]
