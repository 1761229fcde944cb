"""Check the store and the airline's books after a run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from agent import Message

from cpkit import CheckpointData, Checkpointer

from .airline import Books, Entry
from .recordings import Conversation, price_of
from .run import MOMENTS, WORST, Run

__all__ = ["Finding", "examine"]

Stored = dict[str, CheckpointData[Message]]


@dataclass(frozen=True)
class Finding:
    """One row of the result; ``holds`` is None for a row that cannot fail."""

    what: str
    seen: list[str]
    holds: bool | None


async def examine(
    cp: Checkpointer[Message], run: Run, conversations: list[Conversation], books: Books
) -> list[Finding]:
    """Compare the store and the airline's books with the recordings."""
    loaded = [(c.thread_id, await cp.load(c.thread_id)) for c in conversations]
    stored = {thread: data for thread, data in loaded if data is not None}
    due = {key: entry for c in conversations for key, entry in c.changes.items()}
    done = [e for e in books.entries() if e.key.startswith(f"{run.job.run}/")]
    findings = [
        _kills(run),
        _transcripts(conversations, stored),
        _acknowledged(run),
        _spend(run, conversations, stored),
        _books(due, done),
    ]

    if run.job.ledger:
        findings += [
            _unclear(run, stored),
            await _records(cp, due),
            *_replays(run),
        ]

    return findings


def _kills(run: Run) -> Finding:
    moments = Counter(kill.moment for kill in run.kills)
    when = [f"{moments[m]} {words}" for m, words in MOMENTS.items() if moments[m]]
    seen = [f"{len(run.kills)} with SIGKILL", *when]

    if run.primary:
        seen.append(f"and the primary {run.primary} of the store, half way")

    return Finding("kills", seen, moments[WORST] > 0)


def _transcripts(conversations: list[Conversation], stored: Stored) -> Finding:
    kept = sum(data.version for data in stored.values())
    recorded = sum(len(c.messages) for c in conversations)
    # Compared as JSON text, so that the order of keys counts too.
    different = [
        c.name
        for c in conversations
        if c.thread_id not in stored
        or json.dumps(stored[c.thread_id].messages) != json.dumps(c.messages)
    ]
    seen = f"{kept} messages stored, {recorded} in the recordings"
    verdict = f"different: {', '.join(different)}" if different else "equal to the byte"
    return Finding("transcripts", [seen, verdict], not different)


def _acknowledged(run: Run) -> Finding:
    """Check that none is lost; the failover of a primary may lose the last ones."""
    if run.lost and run.primary:
        seen = f"lost with the primary, and written again: {', '.join(run.lost)}"
        return Finding("acknowledged writes", [seen], None)

    seen = f"lost in: {', '.join(run.lost)}" if run.lost else "none lost by a kill"
    return Finding("acknowledged writes", [seen], not run.lost)


def _spend(run: Run, conversations: list[Conversation], stored: Stored) -> Finding:
    """Check extra: it counts every reply, and at most one lost reply for each kill.

    With a primary, two writes of a thread may be lost or unclear.
    """
    replies, paid, spent = 0, 0, 0.0
    holds = True

    for c in conversations:
        prices = [
            price_of(c.messages[:at], message)
            for at, message in enumerate(c.messages)
            if message["role"] == "assistant"
        ]
        extra = stored[c.thread_id].extra if c.thread_id in stored else {}
        count, usd = extra.get("replies"), extra.get("spent_usd")

        if not isinstance(count, int) or not isinstance(usd, float):
            return Finding("spend", [f"not stored for {c.name}"], False)

        # The agent rounds the sum to a millionth after each reply.
        most = len(run.kills) + 2 * (run.primary is not None)
        holds &= 0 <= count - len(prices) <= most
        holds &= usd >= sum(prices) - 1e-6 * len(prices)
        replies, paid, spent = replies + len(prices), paid + count, spent + usd

    seen = [f"${spent:.2f} for {paid} replies"]

    if paid != replies:
        seen.append(f"replies lost with a worker and requested again: {paid - replies}")

    return Finding("spend", seen, holds)


def _books(due: dict[str, Entry], done: list[Entry]) -> Finding:
    seen: set[str] = set()
    repeated: Counter[str] = Counter()

    for entry in done:
        if entry.key in seen:
            repeated[entry.tool] += 1

        seen.add(entry.key)

    missing = len(due.keys() - seen)
    wrong = sum(due.get(entry.key) != entry for entry in done)
    faults = [
        *([f"made again: {_listed(repeated)}"] if repeated else []),
        *([f"never made: {missing}"] if missing else []),
        *([f"different from the recording: {wrong}"] if wrong else []),
    ]
    return Finding(
        "the airline's books",
        [
            f"{len(done)} entries for {len(due)} calls that change something",
            *(faults or ["each call has exactly one entry"]),
        ],
        not faults,
    )


def _unclear(run: Run, stored: Stored) -> Finding:
    landed = sum(run.resolved.values())
    never = len(run.resolved) - landed
    left = [thread for thread, data in stored.items() if data.pending]
    seen = [f"{len(run.resolved)} had a claim and no result after a kill"]

    if landed:
        seen.append(f"in the airline's books, so recorded and not repeated: {landed}")

    if never:
        seen.append(f"not in the books, so released and made under that key: {never}")

    if left:
        seen.append(f"still pending: {', '.join(left)}")

    return Finding("unclear calls", seen, not left)


async def _records(cp: Checkpointer[Message], due: dict[str, Entry]) -> Finding:
    """Compare the store's record of every call with the recordings."""
    good, retried = 0, 0

    for key, entry in due.items():
        record = await cp.find_completed(key)

        if record is not None:
            call = record.call
            facts = Entry(key, call.tool_name, dict(call.args), str(record.result))
            good += facts == entry
            retried += record.attempt > 1

    seen = [f"{good} of {len(due)} completed, with the airline's answer"]

    if retried:
        seen.append(f"with more than one attempt: {retried}")

    return Finding("the record of calls", seen, good == len(due))


def _replays(run: Run) -> Iterable[Finding]:
    total = run.replayed.total()
    names = [_listed(run.replayed)] if total else []
    yield Finding(
        "replayed",
        [f"{total} recorded results were used in place of a call", *names],
        None,
    )
    yield Finding(
        "without the record",
        [f"calls that would have run twice: {total} (--no-ledger shows it)"],
        None,
    )


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{n} x {name}" for name, n in counts.most_common())
