"""The thread id of a session of the OpenAI Agents SDK. It does not need the SDK."""

from __future__ import annotations

from cpkit.driver.ids import check_id

__all__ = ["session_thread"]

_PREFIX = "cpkit:openai-agents:"


def session_thread(session_id: str) -> str:
    """Return the id of the thread that holds a session.

    Raises ``InvalidId`` if the session id is empty or has a NUL, or if the thread's id
    is longer than 512 bytes.
    """
    check_id("session_id", session_id)
    return check_id("session_id, with its prefix,", f"{_PREFIX}{session_id}")
