"""``cpkit runs`` and ``cpkit submit``: the runs of threads, and a new one."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer

from cpkit.cli.decide import parse_json
from cpkit.cli.output import print_json, print_table, printable, write
from cpkit.cli.prune import duration
from cpkit.cli.running import print_stderr, run
from cpkit.cli.stores import Json, Url, open_store, split_words, store_url
from cpkit.effects.requests import Requests
from cpkit.errors import CorruptThread
from cpkit.lease import this_process
from cpkit.protocol import KeepsReceipts, ListsThreads
from cpkit.runs.threads import RunList, RunState, holder_of
from cpkit.tools.formats import age, utc_time
from cpkit.worker import submit as submit_thread

__all__ = ["runs", "submit"]

Prefix = Annotated[
    str, typer.Option(help="Only threads whose ids start with this text.")
]
Words = Annotated[
    list[str],
    typer.Argument(
        help="The store's URL, unless CPKIT_URL is set, and the thread.",
        metavar="[URL] THREAD",
        show_default=False,
    ),
]
After = Annotated[
    str | None,
    typer.Option(help="Run it after this time from now, for example 30min or 2h."),
]
Event = Annotated[
    str | None,
    typer.Option(help="What has happened, as JSON; the agent gets it.", metavar="JSON"),
]


class Run(NamedTuple):
    """One open run, for people."""

    thread_id: str
    state: str
    holder: str | None
    since: str | None
    why: list[str]


def runs(url: Url = None, prefix: Prefix = "", json: Json = False) -> None:
    """List runs: running, due, waiting, or ended badly.

    A run that ended well is not listed. A running one has a holder; if the holder died,
    a worker takes over once it is silent. A due one waits for a worker, and a waiting
    one for people. A later one was submitted for a later time.
    """
    found = run(_runs(store_url(url), prefix))

    if json:
        print_json({"runs": [one._asdict() for one in found]})
    elif found:
        print_table(
            ["thread", "state", "holder", "for", "why"],
            [
                (one.thread_id, one.state, one.holder or "", one.since or "", why)
                for one in found
                for why in ["; ".join(one.why)]
            ],
        )
    else:
        print_stderr("no run is open")


async def _runs(url: str, prefix: str) -> list[Run]:
    async with open_store(url, ListsThreads, KeepsReceipts) as cp:
        listed = RunList(cp, prefix)
        await listed.refresh()
        requests = Requests(cp)
        return [
            await _one(thread_id, state, requests)
            for thread_id, state in sorted(listed.mine().items())
        ]


async def _one(thread_id: str, state: RunState, requests: Requests) -> Run:
    why = [wake.why for wake in state.wakes]
    is_decided = False

    for ask in state.asks.values():
        request = await requests.of_ask(ask)

        if isinstance(request, CorruptThread):
            why.append(f"its request {ask.key[:12]} is damaged")
        elif request == "gone":
            continue
        elif request.decision is None:
            why.append(f"asks for {request.tool} {ask.key[:12]}")
        else:
            is_decided = True
            why.append(f"{request.decision}: {request.tool} {ask.key[:12]}")

    if state.term is not None:
        since = age(state.term.issued_at)
        return Run(thread_id, "running", holder_of(state.term), since, why)

    if is_decided or any(wake.is_due for wake in state.wakes):
        ended = next((w.why for w in reversed(state.wakes) if w.why != "submitted"), "")
        name = "ended" if ended.startswith("ended") else "died" if ended else "due"
        return Run(thread_id, name, None, None, why)

    if state.wakes:
        times = [wake.after for wake in state.wakes if wake.after is not None]
        why.append(f"after {utc_time(min(times))} UTC")
        return Run(thread_id, "later", None, None, why)

    return Run(thread_id, "waiting", None, None, why)


def submit(
    words: Words, after: After = None, event: Event = None, json: Json = False
) -> None:
    """Put a thread before the workers.

    One of them calls the agent's function for it. The thread need not exist yet. Each
    submission that a run has not seen is followed by one more run.
    """
    url, thread_id = split_words(words, "THREAD")
    later = None if after is None else duration(after)
    value = None if event is None else parse_json("--event", event)

    async def work() -> None:
        async with open_store(url) as cp:
            by = f"cpkit submit, {this_process()}"
            await submit_thread(cp, thread_id, after=later, event=value, by=by)

    run(work())

    if json:
        print_json({"submitted": thread_id})
    else:
        write(printable(f"submitted: {thread_id}") + "\n")
