"""Certify every store of this repository, and write the certificates into docs.

Run by hand::

    python -m tests.certificates            # all stores
    python -m tests.certificates sqlite     # one of them
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from conformance import Harness, Report, URLHarness, certify
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer
from tests.test_conformance import PostgresHarness, RedisHarness

FOLDER = Path(__file__).parents[1] / "docs" / "certificates"

STORES = ["memory", "sqlite", "file", "postgresql", "redis"]


@contextmanager
def harness_of(store: str) -> Iterator[Harness]:
    """Yield a harness of a new store; relative paths are in the current folder."""
    match store:
        case "memory":
            yield URLHarness("memory://certified")
        case "sqlite":
            yield URLHarness("sqlite:///certified.db")
        case "file":
            yield URLHarness("file:certified")
        case "postgresql":
            with PostgresServer() as server:
                yield PostgresHarness(f"{server.url}?connect_timeout=3", server)
        case _:
            with RedisServer() as redis:
                yield RedisHarness(f"{redis.url}?connect_timeout=3", redis)


def certified(store: str) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)

        with harness_of(store) as harness:
            report = asyncio.run(certify(harness, seed=1))

    return replace(report, target=store)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)

    for store in sys.argv[1:] or STORES:
        report = certified(store)
        assert report.ok, [one.clause.id for one in report.failures]
        title, rest = report.to_markdown().split("\n", 1)
        date = datetime.now(UTC).date()
        page = f"{title}\n\nMade on {date} with `python -m tests.certificates`.\n{rest}"
        (FOLDER / f"{store}.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
