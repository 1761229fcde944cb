"""The demo around ``examples/agent.py``: recorded conversations, and many kills."""
