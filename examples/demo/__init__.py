"""The demo of ``examples/agent.py``: recorded conversations and many kills."""
