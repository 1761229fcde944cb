"""Each view shows what the store holds, and its JSON form has the same data."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cpkit import ToolCall, open_checkpointer
from cpkit.effects import EffectLedger
from cpkit.lease import thread_lease
from cpkit.runs.threads import RUNS, TERM
from cpkit.sessions import SessionLog
from cpkit.ui import newest
from tests.stores import LAYERED, fresh_url
from tests.ui.checks import assert_inert
from tests.ui.conftest import Client
from tests.ui.stocked import stock

VIEWS = {
    "/threads?prefix=order": "order-1042",
    "/thread?id=order-1042": "Let me look at that order.",
    "/thread/message?id=order-1042&at=1": "arrived broken",
    "/thread/calls?id=order-1042": "approval of",
    "/thread/extra?id=order-1042": "ask for approval",
    "/session?id=session-parser": "before the fix",
    "/waiting": "send_voucher",
    "/waiting/calls": "charge",
    "/store": "Largest value",
}


@pytest.mark.parametrize("kind", LAYERED)
async def test_each_view_shows_the_store(
    kind: str, tmp_path: Path, client: Client
) -> None:
    """Every view answers on every kind of store, as a page and as JSON."""
    async with open_checkpointer(fresh_url(kind, tmp_path), message_type=Any) as cp:
        await stock(cp)

        async with client(cp) as http:
            for path, expected in VIEWS.items():
                page = await http.get(path)
                assert (page.status_code, path) == (200, path)
                assert expected in page.text
                assert_inert(page)

                place, _, query = path.partition("?")
                data = await http.get(f"{place}.json?{query}")
                assert data.headers["content-type"] == "application/json"
                assert data.json()

            tree = (await http.get("/session.json?id=session-parser&all=1")).json()
            entry = next(line for line in tree["lines"] if line["kind"] == "user")
            place = f"id=session-parser&entry={entry['entry_id']}"
            state = (await http.get(f"/session/state.json?{place}")).json()
            assert state["state"] == {}
            place = f"id=session-parser&entry={tree['leaf_id']}"
            state = (await http.get(f"/session/state.json?{place}")).json()
            assert state["state"]["budget"] == 25
            left, right = (leaf["entry_id"] for leaf in tree["leaves"])
            place = f"id=session-parser&left={left}&right={right}"
            sides = (await http.get(f"/session/branches.json?{place}")).json()
            assert sides["left"] != sides["right"]
            assert sides["fork"]["text"].startswith("read:")


async def test_an_unknown_parameter_is_ignored(cp: Any, client: Client) -> None:
    """Its name may be that of an argument in cpkit's code."""
    async with client(cp) as http:
        assert (await http.get("/threads?path=/elsewhere")).status_code == 200


async def test_a_long_thread_is_read_in_parts(cp: Any, client: Client) -> None:
    """A page shows the last messages, and links to the earlier ones."""
    await cp.append("long", [{"role": "user", "content": f"n{n}"} for n in range(1000)])

    async with client(cp) as http:
        last = (await http.get("/thread.json?id=long")).json()
        assert [last["start"], last["stop"], last["later"]] == [960, 1000, None]
        first = (await http.get("/thread.json?id=long&start=0&limit=10")).json()
        assert [one["content"] for one in first["messages"]][-1] == "n9"
        assert (first["earlier"], first["later"]) == (None, 10)


async def test_a_trimmed_thread_says_so(cp: Any, client: Client) -> None:
    """Positions stay; no link leads to what is gone."""
    await cp.append("t", [{"role": "user", "content": f"n{n}"} for n in range(60)])
    await cp.trim("t", 15)

    async with client(cp) as http:
        last = (await http.get("/thread.json?id=t")).json()
        assert (last["start"], last["earlier"], last["trimmed"]) == (20, 0, 0)
        first = (await http.get("/thread.json?id=t&start=0&limit=40")).json()
        assert (first["start"], first["earlier"], first["trimmed"]) == (15, None, 15)
        assert first["messages"][0]["content"] == "n15"
        page = (await http.get("/thread?id=t&start=0&limit=40")).text
        assert "The messages before 15 were deleted." in page
        whole = (await http.get("/thread.json?id=t&limit=100")).json()
        assert (whole["start"], whole["trimmed"], whole["later"]) == (15, 15, None)


async def test_threads_are_paged_without_internal_ones(cp: Any, client: Client) -> None:
    """The list leaves out cpkit's own threads, and a page is full nevertheless."""
    for name in ["a", "b", "cpkit:", "cpkit:lease:x", "cpkit:zz", "d", "e"]:
        await cp.append(name, [{}])

    async with client(cp) as http:
        page = (await http.get("/threads.json?order=id&limit=3")).json()
        assert [one["thread_id"] for one in page["threads"]] == ["a", "b", "d"]
        page = (await http.get(f"/threads.json?limit=3&after={page['next']}")).json()
        assert [one["thread_id"] for one in page["threads"]] == ["e"]
        page = (await http.get("/threads.json?internal=1")).json()
        assert len(page["threads"]) == 7


async def test_threads_are_ordered_by_their_last_change(
    cp: Any, client: Client
) -> None:
    """On demand the list begins with the thread that changed last."""
    for name in ["a", "b", "c"]:
        await cp.append(name, [{}])

    await cp.save_extra("b", {"changed": True})

    async with client(cp) as http:
        page = (await http.get("/threads.json?order=changed")).json()
        names = [one["thread_id"] for one in page["threads"]]
        assert (names[0], sorted(names)) == ("b", ["a", "b", "c"])
        assert (page["sorted_of"], page["sorted_all"], page["next"]) == (3, True, None)


async def test_the_page_says_which_threads_are_sorted(
    cp: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond so many ids, the page names what is missing."""
    monkeypatch.setattr(newest, "_LISTED", 2_000)

    for number in range(2_000):
        await cp.append(f"a-{number:04}", [{}])

    async with client(cp) as http:
        assert "are sorted" not in (await http.get("/threads?order=changed")).text
        await cp.append("z", [{}])
        page = (await http.get("/threads.json?order=changed")).json()
        assert (page["sorted_of"], page["sorted_all"]) == (2_000, False)
        assert page["threads"][0]["thread_id"] == "a-1999"
        text = (await http.get("/threads?order=changed")).text
        assert "Only the first 2000 threads in the order of ids are sorted" in text
        assert "limit=500" in text
        page = (await http.get("/threads.json?order=changed&prefix=z")).json()
        assert (page["sorted_all"], len(page["threads"])) == (True, 1)


@pytest.mark.parametrize(
    "name", ["../etc", "a/b?c=d&e", "%2e%2e", "#", "\N{HORSE} id", "+ +", "'\"<>"]
)
async def test_any_id_has_a_page(name: str, cp: Any, client: Client) -> None:
    """An id of any characters is found through the link in the list."""
    await cp.append(name, [{"role": "user", "content": "found it"}])

    async with client(cp) as http:
        listed = await http.get("/threads")
        (link,) = [
            one for one in assert_inert(listed).links if one.startswith("/thread?")
        ]
        assert "found it" in (await http.get(link)).text


async def test_a_state_links_to_no_other_message(cp: Any, client: Client) -> None:
    """A message of the context has another position than its entry in the thread."""
    log = await SessionLog.open(cp, "s")
    entry = await log.append_message({"role": "user", "content": "x" * 5_000})

    async with client(cp) as http:
        page = (await http.get(f"/session/state?id=s&entry={entry}")).text
        assert "/thread/message" not in page
        assert "The message goes on." in page
        assert "/thread/message?id=s&amp;at=1" in (await http.get("/thread?id=s")).text


async def test_a_foreign_call_may_have_the_name_of_an_approval(
    cp: Any, client: Client
) -> None:
    """The page of calls shows it, although its arguments name no tool."""
    await cp.record_issued("t", ToolCall("c", "cpkit:approval", {}, "key"))

    async with client(cp) as http:
        page = await http.get("/thread/calls?id=t")
        assert page.status_code == 200
        assert "approval of <bdi>an effect</bdi>" in page.text


async def test_damaged_calls_do_not_end_a_list(client: Client, tmp_path: Path) -> None:
    """Of a thread and of a lease: each is named."""
    async with open_checkpointer(f"sqlite:///{tmp_path}/store.db") as cp:
        ledger = EffectLedger(cp)

        for thread_id in ("broken", "c"):
            for order in ("7", "8"):
                await ledger.begin(thread_id, "pay", {"order": order})

        lease = ToolCall("1", TERM, {}, "the first term")
        await cp.record_issued(f"{RUNS}:t", lease)

        with closing(sqlite3.connect(tmp_path / "store.db")) as raw, raw:
            raw.execute(
                "UPDATE cpkit_calls SET args = '{' WHERE thread_id LIKE "
                "'cpkit:run:%' OR thread_id = 'broken' AND args LIKE '%:\"7\"%'"
            )

        async with client(cp) as http:
            doubt = (await http.get("/waiting/calls.json")).json()
            waiting = (await http.get("/waiting.json")).json()
            listed = (await http.get("/threads.json")).json()["threads"]
            pages = [
                (await http.get(path)).text
                for path in ("/threads", "/waiting", "/waiting/calls")
            ]

    orders = [(one["thread_id"], one["args"]["args"]) for one in doubt["calls"]]
    assert orders == [("broken", {"order": "8"})] + [
        ("c", {"order": order}) for order in ("7", "8")
    ]
    assert [one.split("'")[1] for one in doubt["damaged"]] == sorted(
        ["broken", f"{RUNS}:t"]
    )
    assert f"{RUNS}:t" in waiting["damaged"][0]
    waits = {one["thread_id"]: one["waits"] for one in listed}
    assert waits == {"broken": None, "c": {"approvals": 0, "calls": 2}}
    assert [page.count("is corrupt at") for page in pages] == [0, 1, 2]


async def test_the_store_view_shows_path_and_size(
    tmp_path: Path, client: Client
) -> None:
    """Where the store knows them."""
    url = f"sqlite:///{tmp_path}/agent.db"

    async with open_checkpointer(url, message_type=Any) as cp:
        async with client(cp, url=url) as http:
            data = (await http.get("/store.json")).json()
            assert data["bytes"] > 0
            page = (await http.get("/store")).text
            assert f"<dt>Path</dt><dd><bdi>{tmp_path}/agent.db</bdi>" in page


async def test_the_store_view_counts_what_doctor_counts(
    cp: Any, client: Client
) -> None:
    """Threads of cpkit itself are not counted."""
    await cp.append("talk", [{"role": "user", "content": "hello"}])
    await cp.append("cpkit:own", [{}, {}])

    async with client(cp) as http:
        data = (await http.get("/store.json")).json()
        assert (data["threads"], data["messages"]) == (1, 1)


async def test_the_store_view_names_the_largest_threads(
    cp: Any, client: Client
) -> None:
    """About how many bytes they have, and of what."""
    await cp.append("talk", [{"text": "x" * 900}] * 30, extra={"k": 1})
    await cp.append("small", [{}])
    await cp.record_issued("calls", ToolCall("c", "pay", {"n": "y" * 5_000}, "k"))

    async with client(cp) as http:
        largest = (await http.get("/store.json")).json()["largest"]
        page = (await http.get("/store")).text

    assert [one["thread_id"] for one in largest] == ["talk", "calls", "small"]
    assert largest[0]["bytes"] == 30 * len('{"text":""}' + "x" * 900) + len('{"k":1}')
    assert largest[1]["shares"] == {"calls": 100}
    assert "Largest threads" in page
    assert "about 27.3 kB: 100 % messages" in page


async def test_the_store_view_names_dead_space(tmp_path: Path, client: Client) -> None:
    """As ``cpkit doctor`` does, with the command that helps."""
    url = f"sqlite:///{tmp_path}/agent.db"

    async with open_checkpointer(url) as cp:
        await cp.append("large", [{"text": "x" * 100_000}])
        await cp.append("small", [{}])
        await cp.delete_thread("large")

    async with open_checkpointer(url) as cp, client(cp, url=url) as http:
        assert "VACUUM" in (await http.get("/store.json")).json()["dead"]["free"]
        assert "VACUUM gives them to the disk" in (await http.get("/store")).text


async def test_a_lease_is_shown_with_its_holder(cp: Any, client: Client) -> None:
    """The page of what waits names the process that runs a thread."""
    async with thread_lease(cp, "busy", holder="worker-7"), client(cp) as http:
        data = (await http.get("/waiting.json")).json()
        assert [one["holder"] for one in data["leases"]] == ["worker-7"]
        assert data["requests"] == []


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/thread?id=missing", 404),
        ("/thread", 400),
        ("/thread?id=" + "x" * 600, 400),
        ("/threads?limit=many", 400),
        ("/session?id=plain", 409),
        ("/session/state?id=missing&entry=1", 404),
        ("/thread/message?id=plain&at=7", 404),
        ("/waiting/decide?id=plain&request=x", 404),
        ("/session?id=words", 409),
        ("/nowhere", 404),
    ],
)
async def test_a_bad_address_is_explained(
    path: str, status: int, cp: Any, client: Client
) -> None:
    """A wrong link gives a page that says what is wrong, and the same as JSON."""
    await cp.append("plain", [{}])
    await cp.append("words", ["not an object"])

    async with client(cp) as http:
        page = await http.get(path)
        assert page.status_code == status
        assert_inert(page)
        place, _, query = path.partition("?")
        data = await http.get(f"{place}.json?{query}")
        assert (data.status_code, list(data.json())) == (status, ["error"])
