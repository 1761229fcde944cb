"""The command: choose conversations, run and kill the agent, check the result."""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from uuid import uuid4

from cpkit import (
    BackendUnavailable,
    CheckpointerError,
    InvalidURL,
    StatesDurability,
    open_checkpointer,
)
from cpkit.effects import EffectLedger, EffectTimeout
from cpkit.registry import redacted

from .airline import Books
from .picture import Picture
from .recordings import BadRecording, Conversation, choose, read
from .run import Job, Run, WorkerFailed
from .verdict import Finding, examine

_EXAMPLES = Path(__file__).parent.parent
_REAL = _EXAMPLES.parent.parent / "shared" / "data" / "airline_transcripts.jsonl"
_BUNDLED = _EXAMPLES / "data" / "conversations.jsonl"
_DATA = _REAL if _REAL.exists() else _BUNDLED

_MOST = 8
"""Conversations to play by default, if the file has so many."""

# Exit statuses, the same as those of the cpkit command.
_BROKEN, _BAD_USE, _UNAVAILABLE, _INTERRUPTED = 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    options = _parser().parse_args(argv)

    try:
        return _demo(options)
    except (InvalidURL, BadRecording) as exc:
        return _fail(_BAD_USE, exc)
    except OSError as exc:
        return _fail(_BAD_USE, f"{exc.filename}: {exc.strerror}")
    except sqlite3.Error as exc:
        return _fail(_BAD_USE, f"the airline's books in {options.folder}: {exc}")
    except BackendUnavailable as exc:
        return _fail(_UNAVAILABLE, exc)
    except (CheckpointerError, WorkerFailed) as exc:
        return _fail(_BROKEN, exc)
    except KeyboardInterrupt:
        return _fail(_INTERRUPTED, "interrupted")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Kill an airline's agent many times, and see it resume.",
        epilog="Exit status: 0 if every check passed, 1 if one failed, 2 for bad use, "
        "3 if the store is unavailable.",
    )
    add = parser.add_argument
    store = parser.add_mutually_exclusive_group()
    store.add_argument("--url", help="the store to use (default: a fresh SQLite file)")
    store.add_argument(
        "--cluster",
        action="store_true",
        help="use a Redis Cluster of six private servers, and kill a primary too",
    )
    add(
        "--conversations",
        type=_at_least_one,
        default=_MOST,
        metavar="N",
        help="how many to play, those with the most bookings first (default: up to "
        f"{_MOST}; the default file has {len(_DATA.read_text().splitlines())})",
    )
    add(
        "--kills",
        type=_at_least_one,
        default=12,
        metavar="N",
        help="how often to kill the agent (default: 12)",
    )
    add(
        "--pace",
        type=_seconds,
        default=0.4,
        metavar="SECONDS",
        help="duration of a model's reply (default: %(default)s)",
    )
    add(
        "--data",
        type=Path,
        default=_DATA,
        metavar="FILE",
        help="recorded conversations, one JSON object a line (default: %(default)s)",
    )
    add(
        "--folder",
        type=Path,
        help="where to keep the airline's books (default: a fresh temporary folder)",
    )
    add(
        "--no-ledger",
        dest="ledger",
        action="store_false",
        help="do not store claims and results, to see the double bookings",
    )
    return parser


def _demo(options: argparse.Namespace) -> int:
    # Each run has its own threads, so that several runs can use one store.
    run_id = f"demo-{uuid4().hex[:8]}"
    conversations = choose(read(options.data, run_id), options.conversations)
    folder: Path | None = options.folder
    url: str | None = options.url
    kill_primary: Callable[[], str] | None = None

    with ExitStack() as stack:
        if options.cluster:
            # Imported here: no other store needs redis.
            from .cluster import Cluster

            folder = folder or _fresh_folder()
            cluster = stack.enter_context(Cluster(folder / run_id))
            url, kill_primary = cluster.url, cluster.kill_primary

        if url is None:
            folder = folder or _fresh_folder()
            url = f"sqlite:///{quote(str((folder / 'agent.db').absolute()))}"

        durability = asyncio.run(_check(url))
        folder = folder or _fresh_folder()
        folder.mkdir(parents=True, exist_ok=True)
        books = Books(folder / "airline-books.db")
        picture = Picture(conversations)
        job = Job(
            url=url,
            data=str(options.data),
            conversations=len(conversations),
            run=run_id,
            books=str(books.path),
            pace=options.pace,
            ledger=options.ledger,
        )
        messages = sum(len(c.messages) for c in conversations)
        log = folder / f"{run_id}.log"
        run = Run(job, messages, options.kills, log, picture, kill_primary)
        primary = ", and a primary of the store" if kill_primary else ""
        picture.head(
            ("store", redacted(url)),
            ("survives", durability),
            ("threads", f"{run_id}/*, {len(conversations)} recorded conversations"),
            ("airline", str(books.path)),
            ("kills", f"{options.kills} planned{primary}"),
        )
        began = time.monotonic()

        try:
            with picture:
                run.play()

            findings = asyncio.run(_examine(run, conversations, books))
        except KeyboardInterrupt:
            where = f"the store is {redacted(url)}; books and log are in {folder}"
            return _fail(_INTERRUPTED, f"interrupted; {where}")

        broken = [finding.what for finding in findings if finding.holds is False]
        verdict = (
            f"Broken: {', '.join(broken)}."
            if broken
            else f"Kills survived: {len(run.kills)}{primary}. "
            + (
                "Lost messages were written again"
                if run.lost
                else "No message was lost"
            )
            + ", and no booking happened twice."
        )
        picture.result(findings, verdict)
        picture.took(time.monotonic() - began, folder)

        # The page cannot show a cluster, which ends with the demo.
        if not options.cluster:
            asyncio.run(_ask(url, f"{run_id}/refund"))
            picture.foot(redacted(url))

        return _BROKEN if broken else 0


async def _check(url: str) -> str:
    """Open the store once, to detect errors early; return its durability."""
    opening = open_checkpointer(url)

    if re.match("memory:|sqlite:/*:memory:", unquote(url), re.IGNORECASE):
        raise InvalidURL(
            f"{redacted(url)} ends with its process, so nothing in it can survive a "
            "kill; use a sqlite:///, file:, postgresql:// or redis:// URL"
        )

    async with opening as cp:
        return str(cp.durability) if isinstance(cp, StatesDurability) else "not stated"


async def _examine(
    run: Run, conversations: list[Conversation], books: Books
) -> list[Finding]:
    async with open_checkpointer(run.job.url) as cp:
        return await examine(cp, run, conversations, books)


async def _ask(url: str, thread_id: str) -> None:
    """Leave a payment that waits for a person, for the page to show."""
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "My flight was cancelled. I want my money back."},
        {
            "role": "assistant",
            "content": "I ask a colleague to approve **218.40 EUR**.",
        },
    ]

    async with open_checkpointer(url) as cp:
        await cp.append(thread_id, talk, expected_version=0)
        ledger = EffectLedger(cp, requires_approval=lambda effect: True)

        with suppress(EffectTimeout):  # no person has decided yet
            await ledger.begin(
                thread_id,
                "refund",
                {"booking": "K7QX2A", "amount": "218.40 EUR"},
                approval_timeout=0,
            )


def _fresh_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="cpkit-demo-"))


def _at_least_one(text: str) -> int:
    number = int(text)

    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")

    return number


def _seconds(text: str) -> float:
    number = float(text)

    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError("must be at least 0, and finite")

    return number


def _fail(status: int, reason: object) -> int:
    print(f"agent.py: {reason}", file=sys.stderr)
    return status
