"""Mistakes of an ordinary program: refused when made, or named in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import pytest

from cpkit import JsonValue, MemoryCheckpointer
from cpkit.effects import Effect, Landed, ToolRegistry, tool
from tests.effects.shop import Shop, Store, quick

ARGS: dict[str, JsonValue] = {"order": 7}
HEX = "0123456789abcdef" * 2
XEH = HEX[::-1]
NOON = "2026-11-26 12:00"


async def test_a_generator_is_refused_as_a_handler_and_as_a_tool() -> None:
    """Calling it would run nothing of its body, and record that as the effect."""

    async def pays_later(effect: Any) -> AsyncIterator[str]:
        yield "paid"

    def pays(effect: Any) -> Iterator[str]:
        yield "paid"

    async with MemoryCheckpointer[Any]() as cp:
        for wrong in (pays_later, pays):
            with pytest.raises(
                TypeError, match="is a generator: its body would not run"
            ):
                await quick(cp).run("t", "pay", {}, wrong)

            with pytest.raises(
                TypeError, match="is a generator: its body would not run"
            ):
                tool(wrong)

        assert await cp.list_calls("t") == []


async def test_an_effect_inside_itself_is_refused(cp: Store, thread: str) -> None:
    """It would wait for itself; another effect may run inside it."""
    ledger = quick(cp)
    inner = Shop("inner")

    async def outer(_: Effect) -> Any:
        with pytest.raises(RuntimeError, match="runs inside its own handler"):
            await ledger.run(thread, "pay", ARGS, inner.charge)

        return await ledger.run(thread, "mail", ARGS, inner.charge)

    async with asyncio.timeout(5):
        assert await ledger.run(thread, "pay", ARGS, outer) == "inner"

    assert len(inner.effects) == 1


@pytest.mark.parametrize(
    ("one", "two", "named"),
    [
        ({"at": "2026-11-26T10:00:00"}, {"at": "2026-11-26T10:00:01"}, "at"),
        ({"id": str(uuid4())}, {"id": str(uuid4())}, "id"),
        ({"nonce": "0f" * 16}, {"nonce": "1e" * 16}, "nonce"),
        ({"now": 1764151200.5}, {"now": 1764151201.5}, "now"),
        ({"ms": 1764151200123, "u": HEX}, {"ms": 1764151200456, "u": XEH}, "ms, u"),
        ({"to": "ann"}, {"to": "bob"}, None),
        ({"to": "ann", "at": NOON}, {"to": "bob", "at": "2026-11-26 12:01"}, None),
        ({"amount": 100}, {"amount": 101}, None),
    ],
)  # fmt: skip
async def test_a_time_or_a_random_value_in_the_arguments_is_named(
    one: dict[str, Any], two: dict[str, Any], named: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """When a second effect of the tool differs from the first in nothing else."""
    async with MemoryCheckpointer[Any]() as cp:
        ledger = quick(cp)

        with caplog.at_level(logging.WARNING, "cpkit.effects"):
            await ledger.run("t", "mail", {"text": "hi", **one}, Shop().charge)
            await ledger.run("t", "mail", {"text": "hi", **one}, Shop().charge)
            assert caplog.text == ""
            await ledger.run("other", "mail", {"text": "hi", **two}, Shop().charge)
            assert caplog.text == ""
            await ledger.run("t", "mail", {"text": "hi", **two}, Shop().charge)

        assert ("arguments that differ only in" in caplog.text) is (named is not None)
        assert named is None or f"differ only in {named}:" in caplog.text
        caplog.clear()
        await ledger.run("t", "mail", {"text": "hi", **one}, Shop().charge, key="call",
                         tool_call_id="c1")  # fmt: skip
        assert caplog.text == ""


async def test_options_of_a_tool_that_is_made_by_a_call_count(
    cp: Store, thread: str
) -> None:
    """As those of the decorator do."""

    def search(city: str) -> str:
        return city

    def verify(_: Effect) -> Landed:
        return Landed("found")

    made = tool(search, verify=verify, side_effects="read", name="look", timeout=5)
    assert (made.options.get("verify"), made.side_effects, made.name) == (
        verify,
        "read",
        "look",
    )
    assert made.options == {"verify": verify, "timeout": 5}


async def test_a_tool_named_by_the_call_runs_at_each_call(
    cp: Store, thread: str
) -> None:
    """A reminder is meant to go out twice; a repeated call of the model replays."""
    sent: list[str] = []

    @tool(key="call")
    async def remind(to: str) -> str:
        sent.append(to)
        return "sent"

    registry = ToolRegistry(quick(cp), [remind])

    for call_id, replayed in (("c1", False), ("c1", True), ("c2", False)):
        outcome = await registry.dispatch(
            thread, "remind", {"to": "ann"}, tool_call_id=call_id
        )
        assert (outcome.content, outcome.replayed) == ("sent", replayed)

    assert sent == ["ann", "ann"]

    with pytest.raises(ValueError, match="named by the model's call"):
        await registry.dispatch(thread, "remind", {"to": "ann"})
