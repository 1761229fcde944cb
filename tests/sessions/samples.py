"""A sample session, and Hypothesis strategies for sessions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

Entry = dict[str, Any]

# One entry of each kind in version 1 of the format; the header has index 0.
VERSION_1: list[Entry] = [
    {"type": "session", "id": "s-1", "timestamp": "2025-11-20T23:33:50.805Z"},
    {"type": "message", "message": {"role": "user", "content": "a"}},
    {"type": "message", "message": {"role": "assistant", "content": [], "model": "m"}},
    {"type": "model_change", "provider": "lab", "modelId": "large"},
    {"type": "message", "message": {"role": "user", "content": "b"}},
    {
        "type": "compaction",
        "summary": "a was said",
        "firstKeptEntryIndex": 4,
        "tokensBefore": 100,
    },
    {"type": "message", "message": {"role": "hookMessage", "content": "c"}},
]


def as_file(folder: Path, lines: list[Any], name: str = "session.jsonl") -> Path:
    """Write lines, each with a newline; a str is written unchanged."""
    path = folder / name
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


# Any text of JavaScript, often with characters that are special in JSON or in lines.
text = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    [
        "\u2028\u2029\x85",
        "\0\x1f\x7f",
        '"\\/\n\r',
        "é😀",
        "__proto__",
        "cut \ud83d",
        "\udfff",
    ]
)

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0.000009, 1e16, 1e21, 1.0, -0.0, 5e-324, 2**70])
    | text,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4)
    ),
    max_leaves=8,
)

_KNOWN = {
    "type",
    "id",
    "parentId",
    "message",
    "firstKeptEntryIndex",
    "firstKeptEntryId",
}
_names = text.filter(lambda name: name not in _KNOWN)
_fields = st.dictionaries(_names, json_values, max_size=3)
_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "hookMessage", "toolResult"])},
    optional={"content": json_values, "model": json_values, "toolCallId": json_values},
)


@st.composite
def linear_sessions(draw: st.DrawFn) -> list[Entry]:
    """Sessions of version 1: entries in order, compactions by index."""
    header = {**draw(_fields), "type": "session", "id": draw(text.filter(bool))}
    header.pop("version", None)
    lines: list[Entry] = [header]

    for _ in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(["message", "compaction", "custom", "label", "?"]))
        entry: Entry = {"type": kind, **draw(_fields)}

        if kind == "message":
            entry["message"] = draw(_messages)
        elif kind == "compaction":
            entry["firstKeptEntryIndex"] = draw(st.integers(0, 12))

        lines.append(entry)

    return lines


@st.composite
def tree_sessions(draw: st.DrawFn, version: int = 3) -> list[Entry]:
    """Sessions with ids: each entry follows any earlier entry, or none."""
    lines = draw(linear_sessions())
    ids: list[str | None] = [None]
    header, *entries = lines
    tree = [{**header, "version": version}]

    for number, entry in enumerate(entries):
        link = {"id": f"e{number}", "parentId": draw(st.sampled_from(ids))}
        ids.append(link["id"])
        tree.append({**entry, **link})

    return tree
