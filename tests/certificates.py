"""Certify every store of this repository.

The certificates are written into build/certificates, and a line of each into
docs/certificates.md. Run by hand::

    make certificates                # all stores
    make certificates ARGS=sqlite    # one of them

Look for false alarms: certify again and again beside busy processes, with another seed
each time, and write no certificate::

    python -m tests.certificates sqlite --repeat 20 --busy 2
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from conformance import Harness, Report, URLHarness, certify
from conformance.clause import Level
from conformance.fork_server import close_server
from conformance.report import SUITE_VERSION
from conformance.runner import Status
from cpkit.keyring import add_key
from tests.servers.galera import GaleraCluster, GaleraHarness
from tests.servers.mariadb import MariaDBHarness, MariaDBServer
from tests.servers.postgres import PostgresServer
from tests.servers.postgres_pair import PairHarness, PostgresPair
from tests.servers.redis import RedisServer
from tests.servers.redis_cluster import ClusterHarness, RedisCluster
from tests.test_conformance import PostgresHarness, RedisHarness

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "certificates"
PAGE = ROOT / "docs" / "certificates.md"

STORES = [
    *("memory", "sqlite", "sqlite-encrypted", "file", "postgresql", "postgresql-pair"),
    *("redis", "redis-always", "redis-cluster", "mariadb", "galera"),
]


@contextmanager
def harness_of(store: str) -> Iterator[Harness]:
    """Yield a harness of a new store; relative paths are in the current folder."""
    match store:
        case "memory":
            yield URLHarness("memory://certified")
        case "sqlite":
            yield URLHarness("sqlite:///certified.db")
        case "sqlite-encrypted":
            add_key(Path("ring.json"), name="certified")

            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("CPKIT_KEYRING", str(Path("ring.json").absolute()))
                yield URLHarness("sqlite:///certified.db")
        case "file":
            yield URLHarness("file:certified")
        case "postgresql":
            with PostgresServer() as server:
                yield PostgresHarness(f"{server.url}?connect_timeout=3", server)
        case "postgresql-pair":
            with PostgresPair() as pair:
                url = f"{pair.url}?connect_timeout=10"
                yield PairHarness(url, pair)
        case "redis-cluster":
            with RedisCluster(links=True) as cluster:
                yield ClusterHarness(cluster.url(connect_timeout=10), cluster)
        case "mariadb":
            with MariaDBServer() as mariadb:
                yield MariaDBHarness(f"{mariadb.url}?connect_timeout=3", mariadb)
        case "galera":
            with GaleraCluster() as galera:
                yield GaleraHarness(galera.url(connect_timeout=10), galera)
        case _:
            fsync = "always" if store == "redis-always" else "everysec"

            with RedisServer(appendfsync=fsync) as redis:
                yield RedisHarness(f"{redis.url}?connect_timeout=3", redis)


def certified(store: str, seed: int = 1) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)

        with harness_of(store) as harness:
            report = asyncio.run(certify(harness, seed=seed))

        os.chdir(FOLDER)

    return replace(report, target=store)


BUSY = "from conformance.parent import lines_from_parent as lines; l = lines()"
BUSY += "; next(l)\nwhile True: pass"


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Let so many processes use a processor each; they end with this one."""
    loops = [
        subprocess.Popen(
            [sys.executable, "-c", BUSY],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for _ in range(count)
    ]

    try:
        for loop in loops:
            assert loop.stdin is not None
            loop.stdin.write(b"go\n")
            loop.stdin.flush()

        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.communicate()


def repeat(store: str, times: int) -> bool:
    """Certify a store so often; print a line for each run, and return if all hold."""
    is_ok = True

    for seed in range(1, times + 1):
        start, used = time.monotonic(), _processor_seconds()
        report = certified(store, seed)
        wall, processor = time.monotonic() - start, _processor_seconds() - used
        load = os.getloadavg()[0]
        print(  # noqa: T201  # a tool run by hand
            f"{store} seed {seed}: {len(report.failures)} failed; {processor:.0f} s of "
            f"processor time, {wall:.0f} s in all, load {load:.0f}",
            flush=True,
        )

        for failure in report.failures:
            is_ok = False
            print(failure.clause.id, failure.trace, flush=True)  # noqa: T201  # likewise

    return is_ok


def _processor_seconds() -> float:
    close_server()  # its time, and that of its workers, counts when it has ended
    of = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(one)[:2]) for one in of)


def main() -> None:
    parser = argparse.ArgumentParser(description="Certify the stores of cpkit.")
    parser.add_argument("stores", nargs="*", metavar="store", help=", ".join(STORES))
    parser.add_argument("--repeat", type=int, metavar="TIMES", help="no certificates")
    parser.add_argument("--busy", type=int, default=0, metavar="PROCESSES")
    given = parser.parse_args()

    if unknown := set(given.stores) - set(STORES):
        parser.error(f"no such store: {', '.join(sorted(unknown))}")

    FOLDER.mkdir(parents=True, exist_ok=True)

    with busy(given.busy):
        if given.repeat:
            held = [repeat(one, given.repeat) for one in given.stores or STORES]
            sys.exit(not all(held))

        for store in given.stores or STORES:
            write(store)


def write(store: str) -> None:
    """Write the certificate of a store, and its line of the page."""
    report = certified(store)
    (FOLDER / f"{store}.md").write_text(report.to_markdown(), encoding="utf-8")
    assert report.ok, [one.clause.id for one in report.failures]
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_line(page, line_of(report)), encoding="utf-8")


def line_of(report: Report) -> str:
    """Return the line of a report in the page's table."""
    cells = [
        f"`{report.target}`",
        f"{datetime.now(UTC):%Y-%m-%d}",
        SUITE_VERSION,
        report.survived,
        *(str(report.counts(one)[Status.PASSED] or "-") for one in Level),
        report.failovers or "-",
    ]
    return f"| {' | '.join(cells)} |"


def with_line(page: str, line: str) -> str:
    """Return the page with the line in place of the store's old one."""
    start = line[: line.index("`", 3) + 1]
    lines = [line if one.startswith(start) else one for one in page.splitlines()]
    assert line in lines, f"{PAGE.name} has no line for this store: {line}"
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
