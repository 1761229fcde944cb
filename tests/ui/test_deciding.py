"""A decision is bound to the request that was shown, and is made once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cpkit.effects import Approval, EffectLedger, EffectTimeout
from tests.effects.shop import claim
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


async def test_an_erased_decision_is_not_shown_as_a_denial(
    cp: Any, client: Client
) -> None:
    """An old link leads to a page that says what is still known."""
    await stock(cp)

    async with client(cp) as http:
        form = await form_of(http)
        assert (await http.post("/waiting/decide", data=form)).status_code == 200
        tomorrow = datetime.now(UTC) + timedelta(days=1)
        assert await cp.erase_calls(form["id"], tomorrow)
        place = {"id": form["id"], "request": form["request"]}
        data = (await http.get("/waiting/decide.json", params=place)).json()
        assert (data["decision"], data["by"]) == ("erased", None)
        page = (await http.get("/waiting/decide", params=place)).text
        assert "not known: the request was erased" in page
        assert "Ask again" not in page


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
                "t",
                "pay",
                {"amount": amount, "for": "rent"},
                approval_timeout=0,
                key_fields=["for"],
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


async def ask(cp: Any, policy: Any) -> EffectLedger:
    """Leave a request of an agent whose policy answers this."""
    ledger = EffectLedger(cp, requires_approval=lambda _: policy, approval_timeout=0)

    with pytest.raises(EffectTimeout):
        await ledger.run("t", "pay", {"amount": 5}, lambda _: None)

    return ledger


async def test_a_value_is_recorded_with_an_approval(cp: Any, client: Client) -> None:
    """And changes the arguments that the policy lets people change."""
    ledger = await ask(cp, Approval(editable=["amount"]))

    async with client(cp) as http:
        form = await form_of(http)
        place = {"id": form["id"], "request": form["request"]}
        page = await http.get("/waiting/decide", params=place)
        assert "it may change amount" in page.text
        wrong = await http.post("/waiting/decide", data=form | {"value": "{"})
        assert wrong.status_code == 400
        assert "nothing was decided" in wrong.text
        answer = await http.post(
            "/waiting/decide", data=form | {"value": '{"amount": 3}'}
        )
        assert answer.status_code == 200
        data = (await http.get("/waiting/decide.json", params=place)).json()
        assert data["value"] == {"amount": 3}

    paid: list[Any] = []
    await ledger.run(
        "t", "pay", {"amount": 5}, lambda effect: paid.append(effect.args["amount"])
    )
    assert paid == [3]


async def test_a_value_that_the_policy_forbids_decides_nothing(
    cp: Any, client: Client
) -> None:
    """The page says which argument it is."""
    ledger = await ask(cp, True)

    async with client(cp) as http:
        form = await form_of(http)
        answer = await http.post(
            "/waiting/decide", data=form | {"value": '{"amount": 3}'}
        )
        assert answer.status_code == 400
        assert "&#39;amount&#39;" in answer.text

    assert len(await ledger.requests()) == 1


async def test_a_request_is_withdrawn_by_a_button(cp: Any, client: Client) -> None:
    """It is gone, and a new run of the effect asks again."""
    ledger = await ask(cp, True)

    async with client(cp) as http:
        form = await form_of(http)
        answer = await http.post(
            "/waiting/decide", data=form | {"decision": "withdraw"}
        )
        assert answer.status_code == 200
        assert "Recorded: withdrawn by" in answer.text

    assert await ledger.requests() == []
    await ask(cp, True)
    assert len(await ledger.requests()) == 1


@pytest.mark.parametrize("said", ["landed", "not_landed"])
async def test_a_person_says_how_a_call_in_doubt_ended(
    cp: Any, client: Client, said: str
) -> None:
    """With name and reason; the page watches the call before."""
    ledger = EffectLedger(cp)
    key = ledger.key("t", "pay", {"amount": 5})
    record = await claim(cp, "t", key, {"amount": 5}, "pay")
    place = {"id": "t", "call": record.call.call_id}

    async with client(cp) as http:
        page = await http.get("/waiting/doubt", params=place)
        token = page.text.partition('name="form_token" value="')[2].partition('"')[0]
        form = {**place, "form_token": token, "reason": "the bank says so"}
        answer = await http.post("/waiting/doubt", data=form)
        assert answer.status_code == 400
        form |= {"said": said, "result": '{"charge": 1}'}
        answer = await http.post("/waiting/doubt", data=form)
        assert answer.status_code == 200
        again = await http.post("/waiting/doubt", data=form)
        assert again.status_code == 409

    (stored,) = await cp.list_calls("t")
    assert stored.status == ("completed" if said == "landed" else "failed")
    signed = stored.result["said"]
    assert (signed["by"], signed["reason"]) == ("anna", "the bank says so")


async def test_a_final_failure_is_reopened_by_a_button(cp: Any, client: Client) -> None:
    """Once, with name and reason; then the effect runs again."""
    ledger = EffectLedger(cp)

    async def pay(effect: Any) -> str:
        if effect.attempt == 1 and effect.key == key:
            raise ValueError("no funds")

        return "paid"

    args: dict[str, Any] = {"amount": 5}
    key = ledger.key("t", "pay", args)

    with pytest.raises(ValueError, match="no funds"):
        await ledger.run("t", "pay", args, pay)

    (record,) = await cp.list_calls("t")
    place = {"id": "t", "call": record.call.call_id}

    async with client(cp) as http:
        calls = await http.get("/thread/calls", params={"id": "t"})
        assert ">failure<" in calls.text
        assert ">reopen</a>" in calls.text
        page = await http.get("/waiting/doubt", params=place)
        assert "It happened" not in page.text
        token = page.text.partition('name="form_token" value="')[2].partition('"')[0]
        form = {**place, "form_token": token, "reason": "a new card"}
        form["said"] = "reopen"
        answer = await http.post("/waiting/doubt", data=form)
        assert answer.status_code == 200
        assert "Reopened" in answer.text
        again = await http.post("/waiting/doubt", data=form)
        assert again.status_code == 409
        page = await http.get("/waiting/doubt", params=place)
        assert "let it run again" not in page.text

    assert await ledger.run("t", "pay", args, pay) == "paid"
    said = [
        one.result
        for one in await cp.list_calls("t")
        if one.call.tool_name == "cpkit:reopen"
    ]
    assert [(one["by"], one["reason"]) for one in said] == [("anna", "a new card")]
