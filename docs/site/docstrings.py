"""Make Markdown of the repository's docstrings, for the reference.

Docstrings are plain text that reads well in an editor. Two of their forms mean code in
Markdown, or nothing: a term with an indented explanation, and a block after ``::``.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

# A line of text, and directly below it an indented paragraph or several.
_TERM = re.compile(
    r"^(?![ >|#*-])(\S.*)\n((?:    .*(?:\n|$)|\n(?=    ))+)", re.MULTILINE
)
_CODE = re.compile(r"^(.*)::\n\n((?:    .*(?:\n|$)|\n(?=    ))+)", re.MULTILINE)

FIELDS_ONLY = {
    "NamedTuple",
    "TypedDict",
    "BaseModel",
    "DriverOptions",
    "_Open",
    "_Message",
}

# Each method of the contract, and the protocol whose docstring describes it.
PROTOCOLS = {
    "load": "Checkpointer",
    "append": "Checkpointer",
    "save_extra": "Checkpointer",
    "record_issued": "Checkpointer",
    "record_result": "Checkpointer",
    "find_completed": "Checkpointer",
    "read": "ReadsRanges",
    "list_threads": "ListsThreads",
    "list_calls": "KeepsReceipts",
    "find_call": "KeepsReceipts",
    "delete_thread": "ErasesThreads",
    "trim": "TrimsThreads",
    "erase_calls": "ErasesCalls",
    "dump_thread": "MovesThreads",
    "restore_thread": "MovesThreads",
    "watch": "WatchesThreads",
    "search_threads": "SearchesThreads",
}


def as_markdown(text: str) -> str:
    """Return the docstring with fenced code and definition lists."""
    parts: list[str] = []

    def keep(code: re.Match[str]) -> str:
        language = "text" if re.search(r"[├└│✗]|^\s*\[", code[2]) else "python"
        body = textwrap.dedent(code[2]).strip("\n")
        before = f"{code[1]}:\n\n" if code[1] else ""
        parts.append(f"{before}```{language}\n{body}\n```\n")
        return f"\0{len(parts) - 1}\0\n"

    text = _CODE.sub(keep, text)
    text = _TERM.sub(lambda m: f"\n{m[1]}\n\n:   {m[2].strip()}\n", text)
    return re.sub("\0(\\d+)\0", lambda m: parts[int(m[1])], text)


class Docstrings(griffe.Extension):
    """Rewrites each docstring when it is read, and adds what the class declares."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Refer to the protocol that describes a method."""
        protocol = PROTOCOLS.get(func.name)

        if func.docstring is None and protocol is not None:
            name = f"cpkit.{protocol}.{func.name}"
            func.docstring = griffe.Docstring(f"As [`{name}`][{name}].", parent=func)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """List the fields of a class that has no constructor to show them."""
        bases = {str(base).rpartition(".")[2] for base in cls.bases}

        if cls.docstring is None or bases.isdisjoint(FIELDS_ONLY):
            return

        fields = [
            f"{one.name}: {one.annotation}" + (f" = {one.value}" if one.value else "")
            for one in cls.attributes.values()
            if one.annotation is not None and one.is_public
        ]

        if fields:
            listing = "\n".join(fields)
            cls.docstring.value += f"\n\n```python\n{listing}\n```\n"

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
