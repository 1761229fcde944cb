"""Markdown of a stored message as safe HTML.

HTML in the text stays text. Links to http, https and mailto are links. An image becomes
a link, because the page loads nothing from other hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from markupsafe import Markup

from cpkit.ui.visible import visible

__all__ = ["markdown"]

_SCHEMES = ("http", "https", "mailto")

_MOST_CELLS = 5_000


def markdown(text: str) -> Markup:
    """Return the text as HTML."""
    return Markup(_parser_for(text).render(visible(text)))


def _parser_for(text: str) -> MarkdownIt:
    """Return the parser: one without tables for a text that could have a huge one.

    Each line of a table gets as many cells as its head, so a short text has many.
    """
    lines = text.split("\n")
    cells = len(lines) * max(line.count("|") for line in lines)
    return _PARSER if cells <= _MOST_CELLS else _WITHOUT_TABLES


def _is_safe(url: str) -> bool:
    try:
        return urlsplit(url.strip()).scheme.lower() in _SCHEMES
    except ValueError:
        return False


def _open_link(
    renderer: RendererHTML,
    tokens: Sequence[Token],
    index: int,
    options: OptionsDict,
    env: EnvType,
) -> str:
    token = tokens[index]
    token.attrSet("rel", "noopener noreferrer nofollow")
    token.attrSet("target", "_blank")
    return renderer.renderToken(tokens, index, options, env)


def _no_style(
    renderer: RendererHTML,
    tokens: Sequence[Token],
    index: int,
    options: OptionsDict,
    env: EnvType,
) -> str:
    """Render a table's cell; its alignment would be an inline style."""
    tokens[index].attrs.pop("style", None)
    return renderer.renderToken(tokens, index, options, env)


def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "breaks": True, "maxNesting": 20})
    # With the rule "image" off, ``![text](url)`` is "!" and a link.
    parser.enable(["table", "strikethrough"]).disable("image")
    rules: dict[str, Any] = {
        "link_open": _open_link,
        "th_open": _no_style,
        "td_open": _no_style,
    }

    for name, rule in rules.items():
        parser.add_render_rule(name, rule)

    parser.validateLink = _is_safe  # type: ignore[method-assign]  # its documented hook
    return parser


_PARSER = _parser()
_WITHOUT_TABLES = _parser().disable("table")
