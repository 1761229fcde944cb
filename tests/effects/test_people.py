"""What people say of calls in doubt, and of final failures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from conformance.slowdown import slowdown
from cpkit import JsonValue, open_checkpointer
from cpkit.effects import EffectFailed, EffectTimeout, NotLanded, tool
from tests.effects.shop import Shop, Store, claim, quick

ARGS: dict[str, JsonValue] = {"order": 7}


async def doubtful(cp: Store, thread: str) -> str:
    """Leave a call without an outcome, like a process that was killed."""
    key = quick(cp).key(thread, "charge", ARGS)
    await claim(cp, thread, key, ARGS)
    return key


async def test_a_person_says_that_an_effect_landed(
    cp: Store, thread: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With its result, a name and a reason; every later caller gets the result."""
    key = await doubtful(cp, thread)
    record = await quick(cp).landed(key, {"charge": "ch_1"}, by="ann", reason="seen")
    said: Any = record.result
    assert (said["said"]["by"], said["said"]["reason"]) == ("ann", "seen")
    assert f"{thread!r}: charge has no outcome; waits up to 0.2 s" in caplog.text
    shop = Shop()
    got = await quick(cp).run(thread, "charge", ARGS, shop.charge)
    assert got == {"charge": "ch_1"}
    assert shop.effects == []


async def test_a_person_says_that_an_effect_did_not_land(
    cp: Store, thread: str
) -> None:
    """Its key is free, and the next run is a new attempt."""
    key = await doubtful(cp, thread)
    record = await quick(cp).not_landed(key, by="ann")
    assert record.status == "failed"
    shop = Shop()
    await quick(cp).run(thread, "charge", ARGS, shop.charge)
    assert [effect.attempt for effect in shop.effects] == [2]


async def test_a_call_that_lives_is_not_in_doubt(
    url: str, cp: Store, thread: str
) -> None:
    """Of this process or another one: a person cannot make it run twice."""
    if url.startswith("memory"):
        pytest.skip("it needs a second handle of the store")

    shop = Shop(gate=asyncio.Event())

    async with open_checkpointer(url) as other:
        ledger = quick(other, stale_after=0.4 * slowdown())
        task = asyncio.create_task(ledger.run(thread, "charge", ARGS, shop.charge))
        await shop.began.wait()

        for one in (other, cp):
            with pytest.raises(ValueError, match="not in doubt: a run is executing"):
                await quick(one).not_landed(shop.effects[0].key)

        assert shop.gate is not None
        shop.gate.set()
        assert await task == {"charge": 1}

        with pytest.raises(ValueError, match="without an outcome"):
            await quick(cp).landed(shop.effects[0].key)


async def test_a_final_failure_is_reopened(cp: Store, thread: str) -> None:
    """As a new attempt under a new key, recorded with name and reason; twice, too."""
    shop = Shop(ValueError("no funds"))
    ledger = quick(cp)
    key = ledger.key(thread, "charge", ARGS)

    with pytest.raises(ValueError, match="no final failure"):
        await ledger.reopen(key)

    keys = [key]

    for _ in range(2):
        with pytest.raises(ValueError, match="no funds"):
            await ledger.run(thread, "charge", ARGS, shop.charge)

        with pytest.raises(EffectFailed):
            await ledger.run(thread, "charge", ARGS, shop.charge)

        keys.append(await ledger.reopen(key, by="ann", reason="the card was blocked"))

        with pytest.raises(ValueError, match="no final failure"):
            await ledger.reopen(key)

    assert len(set(keys)) == 3
    shop.result = "paid"
    assert await ledger.run(thread, "charge", ARGS, shop.charge) == "paid"
    assert await quick(cp).run(thread, "charge", ARGS, shop.charge) == "paid"
    assert [effect.key for effect in shop.effects] == keys
    found = await ledger.find(key)
    assert found is not None
    assert found.result == {"value": "paid"}
    said: list[Any] = [
        one.result
        for one in await cp.list_calls(thread)
        if one.call.tool_name == "cpkit:reopen"
    ]
    assert [one["reason"] for one in said] == ["the card was blocked"] * 2


async def test_two_people_reopen_a_failure_at_once(cp: Store, thread: str) -> None:
    """It is reopened once, and the first name is on record."""
    ledger = quick(cp)

    with pytest.raises(ValueError, match="no funds"):
        await ledger.run(thread, "charge", ARGS, Shop(ValueError("no funds")).charge)

    key = ledger.key(thread, "charge", ARGS)
    both = await asyncio.gather(
        *(ledger.reopen(key, by=name) for name in ("ann", "bob")),
        return_exceptions=True,
    )
    keys = [one for one in both if isinstance(one, str)]
    assert len(set(keys)) == 1


async def test_a_reopened_effect_is_approved_again(cp: Store, thread: str) -> None:
    """The old approval was for the attempt that failed."""
    shop = Shop(ValueError("no funds"))
    ledger = quick(cp, requires_approval=lambda _: True, approval_timeout=0)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "charge", ARGS, shop.charge)

    key = ledger.key(thread, "charge", ARGS)
    assert await ledger.approve(key)

    with pytest.raises(ValueError, match="no funds"):
        await ledger.run(thread, "charge", ARGS, shop.charge)

    reopened = await ledger.reopen(key)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "charge", ARGS, shop.charge)

    (request,) = await ledger.pending(thread)
    assert request.key == reopened


async def test_a_reopened_effect_is_recovered(cp: Store, thread: str) -> None:
    """Its call has the new key, and recover runs it under that key again."""
    sent: list[int] = []

    @tool(name="charge", verify=lambda _: NotLanded())
    async def charge(order: int) -> str:
        sent.append(order)
        return "paid"

    ledger = quick(cp)

    with pytest.raises(ValueError, match="no funds"):
        await ledger.run(thread, "charge", ARGS, Shop(ValueError("no funds")).charge)

    reopened = await ledger.reopen(ledger.key(thread, "charge", ARGS))
    await claim(cp, thread, reopened, ARGS)
    report = await ledger.recover(thread, [charge])
    assert [outcome.content for _, outcome in report.outcomes] == ["paid"]
    assert sent == [7]
