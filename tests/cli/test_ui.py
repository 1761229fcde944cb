"""``ui``: the server as a process. What it shows is tested in ``tests/ui``."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from cpkit.cli.stores import Store
from cpkit.effects import EffectLedger, EffectTimeout
from tests.cli.command import environment, in_store
from tests.processes import Forked


@contextmanager
def served(
    url: str, *options: str, module: str = "cpkit"
) -> Iterator[tuple[Forked, httpx.URL]]:
    """Run the server on a free port; yields the process and its link."""
    words = ("ui", url, "--port", "0", "--json", *options)

    with Forked(module, *words, env=environment()) as process:
        yield process, httpx.URL(json.loads(process.stdout.readline())["url"])


@pytest.fixture
def sqlite_url(sqlite_url: str) -> str:
    """A store with a request that waits."""

    async def ask(cp: Store) -> None:
        ledger = EffectLedger(cp, requires_approval=lambda _: True)

        with pytest.raises(EffectTimeout):
            await ledger.run("t", "wire", {}, lambda _: None, approval_timeout=0)

    in_store(sqlite_url, ask)
    return sqlite_url


def test_a_user_without_a_name_gets_the_page(sqlite_url: str) -> None:
    """The page then names the user by the number."""
    with (
        served(sqlite_url, module="tests.cli.nameless") as (_, link),
        httpx.Client(follow_redirects=True) as http,
    ):
        here = http.get(link).url
        asked = http.get(here.join("/waiting.json")).json()["requests"][0]
        place = {"id": asked["thread_id"], "request": asked["request"]}
        page = http.get(here.join("/waiting/decide"), params=place)
        assert "user 4000000000" in page.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_server_stops_at_once_with_an_open_page(
    sqlite_url: str, number: signal.Signals
) -> None:
    """The page's stream of events ends, whole; nothing is printed."""
    with served(sqlite_url) as (process, link), httpx.Client() as http:
        token = dict(link.params)["token"]
        events = link.copy_with(path="/events").copy_set_param("token", token)
        http.get(events)

        with http.stream("GET", link.join("/events")) as stream:
            received = stream.iter_text()
            assert "event: change" in next(received)
            process.send_signal(number)
            assert list(received) == []

        _, err = process.communicate()
        assert err == ""
        assert process.returncode in (130, 128 + number, -number)


def test_other_hosts_are_allowed_by_name(sqlite_url: str) -> None:
    """With the port or without one: a proxy or port 80 leave it out."""
    options = ("--host", "0.0.0.0", "--allow-host", "Agents.example")

    with served(sqlite_url, *options) as (_, link), httpx.Client() as http:
        for host, status in (
            ("agents.example", 303),
            (f"agents.example:{link.port}", 303),
            (f"127.0.0.1:{link.port}", 303),
            ("127.0.0.1", 303),
            ("evil.example", 421),
            ("agents.example:1", 421),
        ):
            answer = http.get(link, headers={"Host": host})
            assert (host, answer.status_code) == (host, status)

        assert "--allow-host" in answer.text
