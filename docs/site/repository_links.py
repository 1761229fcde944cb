"""Turn links to files outside ``docs`` into links to the repository.

A page links to the code with a relative path, which works where the repository is
shown. On the site such a link leads to the repository's own address. A link to a file
that does not exist is a warning, and ``--strict`` fails on it.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

logger = logging.getLogger("mkdocs.hooks.repository_links")

_LINK = re.compile(r"(\]\()(?!\w+:|#|/)([^)#\s]+)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrite the links of one page; mkdocs calls this for every page."""
    docs = Path(config["docs_dir"])
    repository = docs.parent

    def rewritten(link: re.Match[str]) -> str:
        folder = (docs / page.file.src_uri).parent
        target = Path(os.path.normpath(folder / link[2]))

        if target.is_relative_to(docs):
            return link[0]

        if not target.exists():
            logger.warning("%s: there is no file %s", page.file.src_uri, link[2])

        kind = "tree" if target.is_dir() else "blob"
        place = target.relative_to(repository).as_posix()
        return f"{link[1]}{config['repo_url']}/{kind}/main/{place}"

    return _LINK.sub(rewritten, markdown)
