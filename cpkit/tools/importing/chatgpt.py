"""ChatGPT's export: the conversations of one ``conversations.json``.

Each becomes a session of `cpkit.sessions` under its own id, with every branch: an entry
for each node, whose parent is the node's. They stand in the order of their times, so
that a conversation that went on is only appended to, and the newest one is the leaf. An
entry has the role and the text as its message, and all else of the node's message under
``chatgpt``.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from cpkit.driver.ids import check_id
from cpkit.errors import CheckpointerError
from cpkit.sessions.entries import Entry, new_header
from cpkit.tools.importing.source import BadSource, Found, Left, Thread, parsed

__all__ = ["is_chatgpt", "read_chatgpt"]

_TITLE = "title"


def is_chatgpt(head: bytes) -> bool:
    """Return whether a file that begins so is an export of ChatGPT."""
    return head.lstrip().startswith(b"[") and b'"mapping"' in head


def read_chatgpt(files: list[Path], *, skip_corrupt: bool) -> Iterator[Found]:
    """Yield the conversations of the files; ``skip_corrupt`` changes nothing."""
    for path in files:
        try:
            conversations, missing = parsed(path.read_bytes())
        except ValueError as exc:
            raise BadSource(f"{path}: not JSON: {exc}") from exc

        yield from (Left(path.name, reason) for reason in missing)

        if not isinstance(conversations, list):
            raise BadSource(f"{path}: not a list of conversations")

        for number, conversation in enumerate(conversations, 1):
            yield _conversation(f"{path.name}, conversation {number}", conversation)


def _conversation(name: str, conversation: Any) -> Found:
    fields = conversation if isinstance(conversation, dict) else {}
    nodes = fields.get("mapping")

    if not isinstance(nodes, dict):
        return Left(name, "a conversation without messages", is_thread=True)

    try:
        found = fields.get("conversation_id") or fields.get("id")
        session_id = check_id("conversation_id", found)
    except CheckpointerError as exc:
        return Left(name, str(exc), is_thread=True)

    header = new_header(session_id, "")
    header["timestamp"] = _stamp(fields.get("create_time"))
    title = {
        "type": "session_info",
        "id": _TITLE,
        "parentId": None,
        "timestamp": header["timestamp"],
        "name": str(fields.get("title") or session_id),
    }
    return Thread(name, session_id, [header, title, *_entries(nodes, fields)])


def _entries(nodes: dict[str, Any], fields: dict[str, Any]) -> Iterator[Entry]:
    """Yield an entry for each node behind its parent's, by time."""
    # Not by the lists of children, which may lack a node.
    children: dict[str | None, list[str]] = {}

    for node_id in nodes:
        children.setdefault(_parent(nodes, node_id), []).append(node_id)

    first = _stamp(fields.get("create_time"))
    count = iter(range(len(nodes)))
    todo = [(first, next(count), node_id) for node_id in children.get(None, [])]

    while todo:
        before, _, node_id = heappop(todo)
        entry = _entry(node_id, _parent(nodes, node_id) or _TITLE, nodes[node_id])
        # A node without a time, or an edited one, stands behind its parent.
        entry["timestamp"] = entry["timestamp"] or before
        yield entry

        for child in children.get(node_id, []):
            stamp = _time(nodes[child]) or entry["timestamp"]
            heappush(todo, (stamp, next(count), child))


def _parent(nodes: dict[str, Any], node_id: str) -> str | None:
    node = nodes[node_id]
    parent = node.get("parent") if isinstance(node, dict) else None
    return parent if isinstance(parent, str) and parent in nodes else None


def _entry(node_id: str, parent: str, node: Any) -> Entry:
    message = node.get("message") if isinstance(node, dict) else None

    if not isinstance(message, dict):
        kind = {"type": "custom", "customType": "chatgpt", "data": message}
        return {**kind, "id": node_id, "parentId": parent, "timestamp": None}

    author = message.get("author")
    role = author.get("role") if isinstance(author, dict) else None
    content = message.get("content")
    content = content if isinstance(content, dict) else {}
    parts, text = content.get("parts"), content.get("text")
    rest = dict(message)

    if isinstance(parts, list) and all(isinstance(one, str) for one in parts):
        text = "\n".join(parts)
        rest["content"] = {k: v for k, v in content.items() if k != "parts"}

    return {
        "type": "message",
        "id": node_id,
        "parentId": parent,
        "timestamp": _time(node),
        "message": {"role": str(role or "user"), "content": text or ""},
        "chatgpt": rest,
    }


def _time(node: Any) -> str | None:
    message = node.get("message") if isinstance(node, dict) else None
    seconds = message.get("create_time") if isinstance(message, dict) else None
    stamp: str | None = _stamp(seconds, None)
    return stamp


def _stamp(seconds: Any, default: Any = "1970-01-01T00:00:00.000Z") -> Any:
    """Return a time as sessions write it."""
    try:
        time = datetime.fromtimestamp(seconds, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return default

    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
