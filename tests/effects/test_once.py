"""`once`: a plain function runs once for each key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cpkit import MemoryCheckpointer
from cpkit.effects import EffectFailed, NoEffect, current_key, once
from cpkit.sync import SyncCheckpointer
from tests.effects.shop import Store


@dataclass
class Order:
    """What programs pass around; JSON does not hold it."""

    id: str


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_plain_function_runs_once_for_each_key(
    cp: Store, thread: str, kind: str
) -> None:
    """Its arguments need not be JSON; the key is there to pass downstream."""
    charged: list[Any] = []
    decorate = once(cp, key=lambda order, **_: f"charge:{order.id}")

    if kind == "async":

        @decorate
        async def charge(order: Order, amount: int) -> dict[str, int]:
            charged.append((order.id, amount, current_key()))
            return {"paid": amount}

    else:

        @decorate
        def charge(order: Order, amount: int) -> dict[str, int]:
            charged.append((order.id, amount, current_key()))
            return {"paid": amount}

    order = Order(thread)
    assert await charge(order, amount=5) == {"paid": 5}
    assert await charge(order, amount=6) == {"paid": 5}
    assert await charge(Order(f"{thread}-2"), amount=7) == {"paid": 7}
    assert [one[:2] for one in charged] == [(thread, 5), (f"{thread}-2", 7)]
    assert len({one[2] for one in charged}) == 2
    assert charge.__name__ == "charge"


def test_a_sync_program_needs_no_event_loop(tmp_path: Path) -> None:
    """With a ``SyncCheckpointer`` the decorated function is a plain one, too."""
    charged: list[str] = []

    with SyncCheckpointer(f"sqlite:///{tmp_path}/once.db") as cp:

        @once(cp, key=lambda order: order)
        def charge(order: str) -> str:
            charged.append(current_key())
            return f"paid {order}"

        assert [charge("a"), charge("a"), charge("b")] == ["paid a", "paid a", "paid b"]

    assert len(charged) == 2


async def test_a_failure_is_final_and_no_effect_is_not(cp: Store, thread: str) -> None:
    """As for any effect."""
    fails: list[Exception] = [NoEffect("busy"), ValueError("no funds")]

    @once(cp, key=lambda order: order)
    async def charge(order: str) -> None:
        raise fails.pop(0)

    with pytest.raises(NoEffect):
        await charge(thread)

    with pytest.raises(ValueError, match="no funds"):
        await charge(thread)

    with pytest.raises(EffectFailed, match="no funds"):
        await charge(thread)


async def test_the_store_may_be_opened_later() -> None:
    """A module is imported before its program opens the store."""
    opened: list[Any] = []

    @once(lambda: opened[-1], key=lambda n: f"n {n}")
    async def double(n: int) -> int:
        return 2 * n

    async with MemoryCheckpointer[Any]() as cp:
        opened.append(cp)
        assert await double(4) == 8

    async with MemoryCheckpointer[Any]() as cp:
        opened.append(cp)
        assert await double(5) == 10


async def test_what_cannot_be_run_once_is_refused(cp: Store) -> None:
    """A generator, a key that is not a text, arguments that do not fit, and options."""

    async def many() -> Any:
        yield 1

    with pytest.raises(TypeError, match="generator"):
        once(cp, key=lambda: "k")(many)

    with pytest.raises(TypeError, match="once names its effects by key="):
        once(cp, key=lambda: "k", idempotency_key="k")

    @once(cp, key=lambda n: n)
    async def one(n: Any) -> None:
        raise AssertionError

    with pytest.raises(TypeError, match="must return a text, not 7"):
        await one(7)

    with pytest.raises(TypeError, match="missing a required argument"):
        await one()


async def test_current_key_is_of_the_innermost_handler(cp: Store, thread: str) -> None:
    """Outside a handler it is an error."""
    keys: list[str] = []

    @once(cp, key=lambda: f"inner {thread}")
    async def inner() -> None:
        keys.append(current_key())

    @once(cp, key=lambda: f"outer {thread}")
    async def outer() -> None:
        keys.append(current_key())
        await inner()
        keys.append(current_key())

    await outer()
    assert keys[0] == keys[2] != keys[1]

    with pytest.raises(RuntimeError, match="outside the handler"):
        current_key()
