"""The thread id of a transcript of the Claude Agent SDK. It does not need the SDK."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from cpkit.driver.ids import check_id

__all__ = ["PREFIX", "transcript_thread"]

PREFIX = "cpkit:claude-agent-sdk:"


def transcript_thread(key: Mapping[str, Any]) -> str:
    """Return the id of the thread that holds a transcript; ``key`` is a ``SessionKey``.

    Raises ``InvalidId`` for an empty part, or if the id is longer than 512 bytes.
    """
    parts = [key["project_key"], key["session_id"]]

    if "subpath" in key:
        parts.append(key["subpath"])

    for name, part in zip(
        ("project_key", "session_id", "subpath"), parts, strict=False
    ):
        check_id(name, part)

    encoded = "/".join(quote(part, safe="") for part in [*parts, ""][:3])
    return check_id("the session key, with its prefix,", f"{PREFIX}{encoded}")
