"""Sessions: a thread as an event log and a tree.

::

    log = await SessionLog.open(cp, "session-1")
    await log.append_message({"role": "user", "content": "hello"})
    log.context().messages
"""

from cpkit.sessions.context import CustomMessages, Model, SessionContext
from cpkit.sessions.errors import NotASession, Trimmed, UnknownEntry
from cpkit.sessions.jsonl import SessionFile, SkippedLine, read_jsonl
from cpkit.sessions.log import SessionLog
from cpkit.sessions.migrate import migrate
from cpkit.sessions.toolcalls import MissingResult
from cpkit.sessions.tree import TreeNode
from cpkit.sessions.typed import message_union
from cpkit.sessions.view import SessionVersion, SessionView

__all__ = [
    "CustomMessages",
    "MissingResult",
    "Model",
    "NotASession",
    "SessionContext",
    "SessionFile",
    "SessionLog",
    "SessionVersion",
    "SessionView",
    "SkippedLine",
    "TreeNode",
    "Trimmed",
    "UnknownEntry",
    "message_union",
    "migrate",
    "read_jsonl",
]
