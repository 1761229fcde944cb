"""``cpkit worker``: call an agent's function for threads that need a run."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Annotated

import typer

from cpkit.cli.loading import load
from cpkit.cli.output import print_json, printable, write
from cpkit.cli.prune import (
    CallsOlderThan,
    KeepLast,
    MessagesOlderThan,
    OlderThan,
    policy_of,
)
from cpkit.cli.running import BadUse, run
from cpkit.cli.stores import Json, open_store, split_words
from cpkit.runs.waiting import check_interval
from cpkit.worker import Worker

__all__ = ["worker"]

Words = Annotated[
    list[str],
    typer.Argument(
        help="The store's URL, unless CPKIT_URL is set, and the agent's function: "
        "async def agent(cp, lease).",
        metavar="[URL] MODULE:AGENT",
        show_default=False,
    ),
]
Prefix = Annotated[
    str, typer.Option(help="Run only threads whose ids start with this text.")
]
Concurrency = Annotated[int, typer.Option(help="Threads to run at a time.", min=1)]
StaleAfter = Annotated[
    float,
    typer.Option(help="Seconds without a heartbeat after which a run is dead."),
]
Poll = Annotated[float, typer.Option(help="The longest time between two looks.")]
Grace = Annotated[
    float, typer.Option(help="Seconds that runs get to end after SIGTERM.")
]
Once = Annotated[
    bool,
    typer.Option(
        "--once",
        help="Run what is due now, and exit. A lease that another run holds is watched "
        "until a heartbeat shows that it lives, or the run counts as dead.",
    ),
]
HealthEvery = Annotated[
    float | None,
    typer.Option(
        "--health",
        help="Print the worker's health every so many seconds: a line, or with --json "
        "a JSON document.",
        metavar="SECONDS",
    ),
]


def worker(
    words: Words,
    prefix: Prefix = "",
    concurrency: Concurrency = 4,
    stale_after: StaleAfter = 15.0,
    poll: Poll = 2.0,
    grace: Grace = 30.0,
    once: Once = False,
    older_than: OlderThan = None,
    keep_last: KeepLast = None,
    messages_older_than: MessagesOlderThan = None,
    calls_older_than: CallsOlderThan = None,
    health: HealthEvery = None,
    json: Json = False,
) -> None:
    """Call an agent's function for threads that need a run.

    A thread needs a run if its last run died, or if an approval request was decided and
    no run has acted on it. The worker holds the thread's lease while the function runs,
    so any number of workers can share a store. Ends after SIGTERM or Ctrl-C, once the
    runs have ended.

    --older-than, --keep-last, --messages-older-than and --calls-older-than are those of
    "cpkit prune": one of the workers applies them once an hour to the threads of its
    --prefix.
    """
    url, target = split_words(words, "MODULE:AGENT")

    if health is not None:
        try:
            check_interval("--health", health)
        except ValueError as exc:
            raise BadUse(str(exc)) from exc

    policy = policy_of(
        older_than, keep_last, messages_older_than, calls_older_than, prefix=prefix
    )
    agent = load(target)
    # Other libraries say at INFO what they do; watchfiles names each change of a file.
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("cpkit").setLevel(logging.INFO)

    async def work() -> None:
        async with open_store(url) as cp:
            try:
                made = Worker(
                    cp,
                    agent,
                    prefix=prefix,
                    concurrency=concurrency,
                    stale_after=stale_after,
                    poll=poll,
                    grace=grace,
                    retention=policy,
                )
            except (TypeError, ValueError) as exc:
                raise BadUse(f"{target}: {exc}") from exc

            if once:
                await made.run_due(wait_for_stale=True)
                _print_health(made, json)
                return

            stop = asyncio.Event()
            loop = asyncio.get_running_loop()

            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop.set)

            report = asyncio.create_task(_report(made, health, json))

            try:
                await made.run(stop)
            finally:
                report.cancel()
                await asyncio.wait([report])

    run(work())


async def _report(made: Worker, seconds: float | None, json: bool) -> None:
    """Print the health now and then, if that is wanted."""
    while seconds is not None:
        await asyncio.sleep(seconds)
        _print_health(made, json)


def _print_health(made: Worker, json: bool) -> None:
    if json:
        print_json(made.health.as_json())
    else:
        write(printable(str(made.health)) + "\n")
