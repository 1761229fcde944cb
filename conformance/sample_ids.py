"""Ids that have broken stores: similar ones, hostile ones, and invalid ones."""

from __future__ import annotations

import unicodedata
from typing import Any

__all__ = ["invalid_ids", "matching_patterns", "similar_ids"]


EDGES = (64, 128, 191, 200, 255, 256, 300)
"""Lengths in bytes."""


def similar_ids(token: str) -> list[str]:
    """Return ids that careless stores mix up, or take for a pattern, path or command.

    All contain the token, so that no earlier run has used them.
    """
    composed = f"{token}-é-Å-한"
    found = [
        token,
        *(token + tail for tail in ":;/\\|*?%_~.-+@#$&='\"`<>[](){},! \t\n\r\x7f"),
        *(token + tail for tail in ("b", "a:", "::", ":b", "/b", "/", "//", "/.")),
        *(f"{c}{token}" for c in "../:*?%_'\"`~-+ \n{[("),
        f"../{token}",
        f"../../{token}",
        f"/{token}",
        f"./{token}",
        f"C:\\{token}",
        f"..\\{token}",
        f"~/{token}",
        f"{token}/..",
        f"{token}/../{token}",
        f"{token}%00",
        f"{token}%2e",
        f"{token}%2F..",
        f"{token}\\0",
        f"{{{token}}}",
        f"{{a}}{token}b",
        f"{{}}{token}",
        f"{token}{{}}",
        f"{{{token}}}:b",
        f"'; DROP TABLE cpkit_threads; --{token}",
        f"{token}' OR '1'='1",
        f"{token}\\' --",
        f"$({token})",
        f"`{token}`",
        f"{token}\r\nFLUSHALL\r\n",
        f"{token}-a",
        f"{token}-A",
        f"{token}-ß",
        f"{token}-ss",
        f"{token}-ı",
        f"{token}-I",
        f"{token}-İ",
        composed,
        unicodedata.normalize("NFD", composed),
        f"{token}-ﬁ",
        f"{token}-fi",
        f"{token}-\u200b",
        f"{token}-\u200d",
        f"{token}-\ufeff",
        f"\ufeff{token}",
        f"{token}\ud7ff",
        f"{token}\ue000",
        f"{token}\uffff",
        f"{token}\U0001f600",
        f"{token}\U0010ffff",
        f"con.{token}",
        f"CON.{token}",
        f"nul.{token}.txt",
        f"aux.{token}",
        f"{token}.",
        f"{token}..",
        f"{token} ",
        f" {token}",
        f"{token}.jsonl",
        f"{token}.lock",
        f"{token}.db-wal",
        f"{token}-{'0'}",
        f"{token}-{'00'}",
        f"{token}-{'0.0'}",
        *_long(token),
    ]
    return list(dict.fromkeys(found))


def matching_patterns(token: str) -> tuple[list[str], list[str]]:
    """Return ids, and ids that would match some of them if taken for a pattern.

    The patterns are of the shell, of SQL's ``LIKE`` and of regular expressions. No
    pattern is one of the ids.
    """
    ids = [token, f"{token}1", f"{token}y", f"{token}12", f"a{token}", f"{token}.1"]
    start, last = token[:-1], token[-1]
    patterns = [
        *(token + tail for tail in ("*", "?", "[0-9]", "[!0]", "{1,y}", "**")),
        *(token + tail for tail in ("%", "_", "%%", "\\%")),
        *(token + tail for tail in (".", ".*", ".?", "\\d", "$", "|", "(1|y)")),
        *(f"{start}{end}" for end in (f"[{last}]", "?", "_", ".", f"\\{last}", "*")),
        *(head + token for head in ("*", "?", "%", "_", ".", "^", "[a-z]")),
        f"*{token}*",
        f"%{token}%",
    ]
    return ids, patterns


def _long(token: str) -> list[str]:
    """Return ids of up to 512 bytes that differ only in the last character."""
    room = 512 - len(token)
    wide = room // 4
    rest = "x" * (room - wide * 4)
    return [
        token + "x" * room,
        token + "x" * (room - 1) + "y",
        token + "x" * (room - 1) + "X",
        token + "x" * (room - 1),
        token + "/" * room,
        token + "." * room,
        # Where columns, names of files and buffers end.
        *(token + "x" * (size - len(token)) for size in EDGES),
        *(token + "x" * (size - len(token) - 1) + "y" for size in EDGES),
        token + rest + "😀" * wide,
        token + rest + "😀" * (wide - 1) + "😁",
    ]


def invalid_ids() -> dict[str, Any]:
    """Return invalid ids, by name."""
    return {
        "an empty id": "",
        "513 bytes": "x" * 513,
        "513 bytes in 257 characters": "é" * 256 + "x",
        "a million characters": "x" * 1_000_000,
        "NUL": "a\0b",
        "only NUL": "\0",
        "NUL at the end": "a\0",
        "a lone surrogate": "a\ud800",
        "None": None,
        "an int": 1,
        "a bool": True,
        "bytes": b"a",
        "a tuple": ("a",),
        "a list": ["a"],
    }
