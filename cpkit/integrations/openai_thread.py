"""Which thread holds a session of the OpenAI Agents SDK, for those without the SDK."""

from __future__ import annotations

from cpkit.driver.ids import check_id

__all__ = ["session_thread"]

PREFIX = "cpkit:openai-agents:"


def session_thread(session_id: str) -> str:
    """Return the id of the thread that holds a session.

    Raises ``InvalidId`` for a session id that is empty, has a NUL, or whose thread's id
    would be longer than 512 bytes.
    """
    check_id("session_id", session_id)
    return check_id("session_id, with its prefix,", f"{PREFIX}{session_id}")
