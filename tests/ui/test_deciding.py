"""A decision is bound to the request that was shown, and is made once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cpkit.effects import EffectLedger, EffectTimeout
from tests.ui.conftest import Client
from tests.ui.stocked import stock
from tests.ui.test_guard import form_of


async def test_an_approval_reaches_the_agent(cp: Any, client: Client) -> None:
    """After the form was sent, the effect runs, and the page shows its result."""
    await stock(cp)
    ledger = EffectLedger(cp, requires_approval=lambda effect: True)

    async with client(cp) as http:
        form = await form_of(http)
        answer = await http.post("/waiting/decide", data=form)
        assert answer.status_code == 200
        assert "Recorded: approved by" in answer.text
        args: dict[str, Any] = {"order": 1042, "amount": "89.90 EUR"}
        run = ledger.run("order-1042", "refund", args, lambda effect: "refunded")
        assert await run == "refunded"
        place = {"id": form["id"], "request": form["request"]}
        data = (await http.get("/waiting/decide.json", params=place)).json()
        assert (data["decision"], data["by"]) == ("approved", "anna")
        assert data["effect"]["result"] == {"value": "refunded"}


async def test_the_second_person_sees_who_decided(cp: Any, client: Client) -> None:
    """Of two forms about one request one decides; the other says who was first."""
    await stock(cp)

    async with client(cp) as anna, client(cp, "ben") as ben:
        first, second = await form_of(anna), await form_of(ben)
        second |= {"decision": "deny", "reason": "too much"}
        answers = await asyncio.gather(
            anna.post("/waiting/decide", data=first),
            ben.post("/waiting/decide", data=second),
        )
        assert sorted(answer.status_code for answer in answers) == [200, 409]
        winner, loser = sorted(answers, key=lambda answer: answer.status_code)
        decision = "approved" if winner is answers[0] else "denied"
        person = "anna" if winner is answers[0] else "ben"
        assert f"already {decision} by <bdi>{person}</bdi>" in loser.text
        again = await ben.post("/waiting/decide", data=second)
        assert again.status_code == 409


async def test_a_request_that_is_gone_decides_nothing(cp: Any, client: Client) -> None:
    """If the thread was deleted meanwhile, the page says that nothing was decided."""
    await stock(cp)

    async with client(cp) as http:
        form = await form_of(http)
        await cp.delete_thread("order-1042")
        answer = await http.post("/waiting/decide", data=form)
        assert answer.status_code == 409
        assert "nothing was decided" in answer.text
        await cp.delete_thread("order-1042", forget_keys=True)
        answer = await http.post("/waiting/decide", data=form)
        assert answer.status_code == 404


async def test_a_form_decides_only_the_arguments_it_showed(
    cp: Any, client: Client
) -> None:
    """A second request of the same key, with other arguments, stays undecided."""
    ledger = EffectLedger(cp, requires_approval=lambda effect: True)

    for amount in (5, 5000):
        task = asyncio.ensure_future(
            ledger.run(
                "t",
                "pay",
                {"to": "bob", "amount": amount},
                lambda effect: "paid",
                key_fields=["to"],
                approval_timeout=0,
            )
        )
        await asyncio.wait([task])
        assert task.exception() is not None

    async with client(cp) as http:
        form = await form_of(http)
        assert (await http.post("/waiting/decide", data=form)).status_code == 200
        left = (await http.get("/waiting.json")).json()["requests"]
        assert [one["args"]["amount"] for one in left] == [5000]


async def test_a_request_in_place_of_the_shown_one_is_not_decided(
    cp: Any, client: Client
) -> None:
    """A thread that was forgotten and asks again needs a look at the new arguments."""
    ledger = EffectLedger(cp, requires_approval=lambda effect: True)

    async def ask(amount: int) -> None:
        with pytest.raises(EffectTimeout):
            await ledger.begin(
                "t", "pay", {"amount": amount}, approval_timeout=0, resource="rent"
            )

    await ask(5)

    async with client(cp) as http:
        form = await form_of(http)
        await cp.delete_thread("t", forget_keys=True)
        await ask(5000)
        answer = await http.post("/waiting/decide", data=form)
        assert answer.status_code == 409
        assert "not the one that was shown" in answer.text
        assert len(await ledger.requests()) == 1


async def test_all_arguments_are_shown_before_a_decision(
    cp: Any, client: Client
) -> None:
    """A decision binds the arguments, so the page cuts none of them."""
    ledger = EffectLedger(cp, requires_approval=lambda effect: True)
    args = {"note": "x" * 50_000, "last": "the end"}

    with pytest.raises(EffectTimeout):
        await ledger.begin("t", "pay", args, approval_timeout=0)

    async with client(cp) as http:
        form = await form_of(http)
        place = {"id": form["id"], "request": form["request"]}
        assert "the end" in (await http.get("/waiting/decide", params=place)).text
