"""LangGraph's checkpoints in any cpkit store.

::

    async with open_checkpointer("sqlite:///agent.db") as cp:
        graph = builder.compile(checkpointer=CheckpointSaver(cp))
        await graph.ainvoke(inputs, {"configurable": {"thread_id": "1"}})

Needs ``pip install 'cpkit[langgraph]'``.
"""

from cpkit.registry import needs_extra

with needs_extra("cpkit.integrations.langgraph", "langgraph"):
    from cpkit.integrations.langgraph.errors import NotOwner, TypeRefused, Unsupported
    from cpkit.integrations.langgraph.healing import heal
    from cpkit.integrations.langgraph.names import store_thread_id
    from cpkit.integrations.langgraph.saver import CheckpointSaver

__all__ = [
    "CheckpointSaver",
    "NotOwner",
    "TypeRefused",
    "Unsupported",
    "heal",
    "store_thread_id",
]
