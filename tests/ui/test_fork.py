"""From a message of a session a person starts a branch or a thread."""

from __future__ import annotations

from typing import Any

import pytest

from cpkit.sessions import SessionLog
from tests.ui.checks import assert_inert
from tests.ui.conftest import Client


async def session(cp: Any) -> tuple[SessionLog, str]:
    """Return a session of three messages, and the id of the second."""
    log = await SessionLog.open(cp, "s")
    await log.append_message({"role": "user", "content": "one"})
    second = await log.append_message({"role": "assistant", "content": "two"})
    await log.append_message({"role": "user", "content": "three"})
    return log, second


async def form_at(http: Any, entry: str) -> dict[str, str]:
    """Return the fields of the form that the conversation links to."""
    links = assert_inert(await http.get("/thread?id=s")).links
    (link,) = [one for one in links if one == f"/session/fork?id=s&entry={entry}"]
    page = await http.get(link)
    assert_inert(page)

    def value(name: str) -> str:
        return str(page.text.partition(f'name="{name}" value="')[2].partition('"')[0])

    fields = ("form_token", "id", "entry", "new_id")
    return {name: value(name) for name in fields} | {"text": "another way"}


@pytest.mark.parametrize("into", ["thread", "branch"])
async def test_a_person_forks_at_a_message(into: str, cp: Any, client: Client) -> None:
    """With the first message, in one append; a new thread leaves the session alone."""
    log, second = await session(cp)
    appends = []

    async def append(*args: Any, **options: Any) -> int:
        appends.append(args)
        version: int = await write(*args, **options)
        return version

    write, cp.append = cp.append, append

    async with client(cp) as http:
        form = await form_at(http, second)
        answer = await http.post("/session/fork", data=form | {"into": into})
        assert answer.status_code == 200
        assert "continues with the new message" in answer.text

    name = "s" if into == "branch" else form["new_id"]
    assert name.startswith("s")
    found = await SessionLog.open(cp, name)
    said = [one["content"] for one in found.context().messages]
    assert said == ["one", "two", "another way"]
    news = await log.refresh()
    assert len(news) == (1 if into == "branch" else 0)
    assert len(appends) == 1


async def test_a_fork_that_is_not_possible_writes_nothing(
    cp: Any, client: Client
) -> None:
    """Without a text or a kind, into a taken id, of an unknown entry, read-only."""
    log, second = await session(cp)
    await cp.append("taken", [{}])

    async with client(cp) as http, client(cp, read_only=True) as reader:
        form = await form_at(http, second) | {"into": "thread"}
        assert (
            "<form" not in (await reader.get(f"/session/fork?id=s&entry={second}")).text
        )

        for fields, status in (
            ({"text": " "}, 400),
            ({"into": "nowhere"}, 400),
            ({"new_id": "taken"}, 409),
            ({"new_id": ""}, 400),
            ({"entry": "unknown"}, 404),
            ({"id": "missing"}, 404),
            ({"id": ""}, 400),
        ):
            answer = await http.post("/session/fork", data=form | fields)
            assert (answer.status_code, fields) == (status, fields)

        assert (await reader.post("/session/fork", data=form)).status_code == 403
        assert await log.refresh() == []
        assert len(await cp.list_threads()) == 2


async def test_a_hostile_session_is_forked_safely(cp: Any, client: Client) -> None:
    """Its id and its text are shown and never run."""
    name = '"><script>alert(1)</script>'
    log = await SessionLog.open(cp, name)
    entry = await log.append_message({"role": "user", "content": name})

    async with client(cp) as http:
        page = await http.get("/session/fork", params={"id": name, "entry": entry})
        assert_inert(page)
        assert "<script>alert" not in page.text
