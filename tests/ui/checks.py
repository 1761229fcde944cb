"""What must hold for every page, whatever the store holds."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Self
from urllib.parse import urlsplit

import httpx

__all__ = ["Tags", "assert_inert"]

_VOID = {"br", "hr", "img", "input", "link", "meta"}
_OWN_SCRIPTS = ["/static/cpkit.js"]


class Tags(HTMLParser):
    """The links and tags of a page; fails at what could run or load something."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the tags of a whole page."""
        tags = cls()
        tags.feed(text)
        tags.close()
        assert tags.open == []
        return tags

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("iframe", "object", "embed", "base", "style")

        if tag not in _VOID:
            self.open.append(tag)

        for name, value in attrs:
            assert not name.startswith("on"), (tag, name, value)
            assert name != "style", (tag, value)

            if name == "src" and tag == "img":
                assert value is not None
                assert value.startswith("data:image/"), value[:80]
            elif name == "src":
                self.scripts.append(value or "")
            elif name == "href":
                assert urlsplit(value or "").scheme in ("", "http", "https", "mailto")
                self.links.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_inert(page: httpx.Response) -> Tags:
    """Check that a page runs and loads its own files only; return its tags."""
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    tags = Tags.of(page.text)
    assert tags.scripts == _OWN_SCRIPTS
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", page.text)
    return tags
