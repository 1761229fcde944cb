"""What happens in a simulated run, and the rules that no run may break.

The world keeps the books of the payment server, and sees every operation that the store
applied. It also gets every charge that starts and every outcome that a caller got. It
checks each of them against everything before.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from cpkit import CallRecord, Checkpointer, JsonValue, ToolCall
from cpkit.effects import Effect, Landed, NoEffect, NotLanded
from cpkit.effects.effect import request_key
from cpkit.effects.records import heartbeat_thread
from tests.simulation.faults import Life

__all__ = ["Charge", "Declined", "World"]


class Declined(Exception):
    """The payment server declines a charge: an ordinary failure."""


@dataclass
class Charge:
    """One run of the handler."""

    effect: Effect
    life: Life
    landed: bool = False
    number: int = 0


@dataclass
class World:
    """The payment server, the log and the checks of a simulated run."""

    store: Checkpointer[Any]
    needs_approval: set[str]
    stale_after: float
    longest_delay: float
    log: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    charges: list[Charge] = field(default_factory=list)
    decisions: dict[str, bool] = field(default_factory=dict)
    approved: set[str] = field(default_factory=set)
    """The keys of requests that the store has as approved, erased or not."""
    outcomes: dict[str, dict[str, str]] = field(default_factory=dict)
    verdicts: dict[str, str] = field(default_factory=dict)
    holders: dict[str, str] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    closed: dict[str, float] = field(default_factory=dict)
    claimed: dict[str, tuple[Life, str]] = field(default_factory=dict)
    heartbeats: dict[str, list[float]] = field(default_factory=dict)
    reads: dict[tuple[object, str], float] = field(default_factory=dict)

    def note(self, actor: str, event: str) -> None:
        """Add a line to the history."""
        now = asyncio.get_running_loop().time()
        self.log.append(f"{now:9.3f}  {actor:10} {event}")

    def violate(self, rule: str) -> None:
        """Add a violation, and a line for it in the history."""
        self.violations.append(rule)
        self.note("VIOLATION", rule)

    # What the store applied

    def applied(self, life: Life, operation: str, fact: Any) -> None:
        """Check an operation that the store just applied."""
        subject, answer = fact
        now = asyncio.get_running_loop().time()

        if operation == "record_issued" and answer is None:
            self._claimed(life, subject, now)
        elif operation == "record_result":
            self._resolved(life, answer, now)
        elif operation == "save_extra":
            for name in subject:
                if name in self.heartbeats:  # else it wakes those that watch decisions
                    self.heartbeats[name].append(now)
        elif operation == "read" and subject is not None:
            self.reads[asyncio.current_task(), subject] = now

    def _claimed(self, life: Life, call: ToolCall, now: float) -> None:
        self.heartbeats[call.call_id] = [now]
        self.claimed[call.call_id] = life, call.idempotency_key
        held_by = self.holders.setdefault(call.idempotency_key, call.call_id)
        self.note(life.name, f"claims {call.tool_name} {_args(call.args)}")

        if held_by != call.call_id:
            self.violate("two holders of one key")

    def _resolved(self, life: Life, record: CallRecord, now: float) -> None:
        call = record.call
        self.note(life.name, f"resolves {call.tool_name} {record.status}")
        owner, key = self.claimed.get(call.call_id, (life, ""))

        if isinstance(record.result, dict) and record.result.get("approved") is True:
            self.approved.add(call.idempotency_key)

        if owner is not life:
            self.closed.setdefault(call.call_id, now)

        if record.status == "failed" and self.holders.get(key) == call.call_id:
            del self.holders[key]
            self.released.add(call.call_id)
            reader = asyncio.current_task()
            read_at = self.reads.get((reader, heartbeat_thread(call.call_id)), now)
            beats = (beat for beat in self.heartbeats[call.call_id] if beat < read_at)
            silent = read_at - max(beats, default=read_at)

            landed = any(
                c.landed for c in self.charges if c.effect.call_id == call.call_id
            )

            # A dead holder's lease is proof, too, and may be older than its heartbeat.
            is_effect = not call.tool_name.startswith("cpkit:")
            is_other = owner is not life and owner.alive and is_effect

            if is_other and silent < self.stale_after:
                self.violate(f"taken over after {silent:.1f} s without a heartbeat")

            if owner is life and landed and silent < self.stale_after:
                self.violate("a worker released an effect that it knew to have landed")

    # The payment server

    async def charge(self, effect: Effect, life: Life, mood: str) -> JsonValue:
        """Charge a card; each call is another charge."""
        await self._check_start(effect)
        charge = Charge(effect, life)
        self.charges.append(charge)
        self.note(life.name, f"charges {_args(effect.args)}, attempt {effect.attempt}")

        await life.point()

        if mood == "no effect":
            raise NoEffect("try again")

        if mood == "declined":
            raise Declined("no funds")

        charge.landed = True
        charge.number = sum(c.landed for c in self.charges)
        self.note(life.name, f"landed {_args(effect.args)} as {charge.number}")
        await life.point()
        return {"charge": charge.number}

    async def verify(self, effect: Effect) -> Landed | NotLanded:
        """Look the effect up in the books."""
        numbers = [c.number for c in self._of(effect.key) if c.landed]
        self.verdicts[effect.key] = "landed" if numbers else "not landed"
        self.note("books", f"{_args(effect.args)}: {self.verdicts[effect.key]}")
        return Landed({"charge": numbers[0]}) if numbers else NotLanded()

    async def nothing_landed(self, effect: Effect) -> NotLanded:
        """Say that an effect which the books do not have did not happen."""
        return NotLanded()

    async def _check_start(self, effect: Effect) -> None:
        if effect.args["order"] in self.needs_approval:
            result: Any = {"withdrawn": True}
            number = 0

            while result.get("withdrawn") is True:
                number += 1
                key = request_key(effect.key, number)
                found = await self.store.find_completed(key)
                result = {} if found is None else found.result

                if found is not None and found.erased:  # its content, by a policy
                    is_approved = key in self.approved
                    result = {"approved": is_approved, "withdrawn": not is_approved}

            if result.get("approved") is not True:
                self.violate("an unapproved effect ran")

        if self.decisions.get(effect.key) is False:
            self.violate("an effect ran after its denial was acknowledged")

        if effect.call_id in self.closed:
            # It was taken over between the store's answer and this line. Only the
            # payment server can stop it, by key and attempt; but the time is short.
            now = asyncio.get_running_loop().time()
            late = now - self.closed[effect.call_id]

            if late > self.longest_delay:
                self.violate(f"an effect began {late:.1f} s after it was taken over")

            return

        if self.verdicts.get(effect.key) == "landed":
            self.violate("an effect ran again after verify had found it")

        if any(c.effect.call_id not in self.released for c in self._of(effect.key)):
            self.violate("an effect was repeated, and its run was not interrupted")

    def _of(self, key: str) -> list[Charge]:
        return [charge for charge in self.charges if charge.effect.key == key]

    # What people and callers got

    def decided(self, key: str, approved: bool) -> None:
        """Check a decision that was acknowledged."""
        self.note("approver", f"{'approved' if approved else 'denied'} {key[:6]}")

        if self.decisions.setdefault(key, approved) is not approved:
            self.violate("a request was decided both ways")

    def returned(self, life: Life, order: str, outcome: str) -> None:
        """Check the outcome that a caller got for an order."""
        self.note(life.name, f"gets {order}: {outcome}")
        outcomes = self.outcomes.setdefault(order, {})
        outcomes[f"{life.name}/{len(outcomes)}"] = outcome
        different = sorted(set(outcomes.values()))

        if len(different) > 1:
            self.violate(f"callers got different outcomes of {order}: {different}")


def _args(args: Any) -> str:
    inner = args.get("args", args)
    return str(inner.get("order", "?"))
