"""Who may see the page, and which requests may decide something."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from cpkit.ui import app
from cpkit.ui.guard import TokenLogin
from tests.ui.checks import Tags
from tests.ui.conftest import Client
from tests.ui.stocked import stock

HOST = "127.0.0.1:8420"


def served(cp: Any) -> httpx.AsyncClient:
    """Return a client of the page as ``cpkit ui`` serves it, without a login."""
    page = app(
        cp, authorize=TokenLogin("secret-token", "anna", 8420), allowed_hosts=[HOST]
    )
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=page), base_url=f"http://{HOST}"
    )


async def form_of(http: httpx.AsyncClient) -> dict[str, str]:
    """Return the fields of the form for the first request that waits."""
    request = (await http.get("/waiting.json")).json()["requests"][0]
    place = {"id": request["thread_id"], "request": request["request"]}
    page = (await http.get("/waiting/decide", params=place)).text
    token = page.partition('name="form_token" value="')[2].partition('"')[0]
    shown = page.partition('name="shown" value="')[2].partition('"')[0]
    return {
        "form_token": token,
        "shown": shown,
        **place,
        "decision": "approve",
        "reason": "",
    }


async def test_a_link_with_the_token_logs_in(cp: Any) -> None:
    """The token moves from the link into a cookie that scripts cannot read."""
    async with served(cp) as http:
        assert (await http.get("/threads")).status_code == 403
        assert (await http.get("/threads?token=wrong")).status_code == 403
        answer = await http.get("/threads?prefix=a&token=secret-token")
        assert (answer.status_code, answer.headers["location"]) == (
            303,
            "/threads?prefix=a",
        )
        assert "HttpOnly" in answer.headers["set-cookie"]
        assert "SameSite=lax" in answer.headers["set-cookie"]
        assert (await http.get("/threads")).status_code == 200
        again = await http.get("/threads?token=secret-token")
        assert again.headers["location"] == "/threads"
        answer = await http.get("//evil.example/?token=secret-token")
        assert not answer.headers.get("location", "/").startswith("//")


@pytest.mark.parametrize(
    "path", ["/threads", "/threads.json", "/events", "/static/cpkit.js", "/nowhere"]
)
async def test_without_a_login_nothing_is_served(path: str, cp: Any) -> None:
    """A request without the token gets no page, no data and no file."""
    async with served(cp) as http:
        answer = await http.get(path)
        assert answer.status_code == 403
        assert "token" in answer.text


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:9", ""])
async def test_a_foreign_host_is_refused(host: str, cp: Any) -> None:
    """A page under another name (DNS rebinding) is refused, the login too."""
    async with served(cp) as http:
        answer = await http.get("/threads?token=secret-token", headers={"Host": host})
        assert answer.status_code == 421
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"form_token": ""}, {}),
        ({"form_token": "0" * 64}, {}),
        ({}, {"Origin": "http://evil.example"}),
        ({}, {"Origin": "null"}),
        ({}, {"Origin": "http://["}),
        ({}, {"Sec-Fetch-Site": "cross-site"}),
        ({"reason": "x" * 100_000}, {}),
        ({f"more{n}": "" for n in range(60)}, {}),
    ],
)
async def test_a_forged_form_decides_nothing(
    fields: dict[str, str], headers: dict[str, str], cp: Any, client: Client
) -> None:
    """Without the page's own token, or from another site, a form is refused."""
    await stock(cp)

    async with client(cp) as http:
        form = {**await form_of(http), **fields}
        answer = await http.post("/waiting/decide", data=form, headers=headers)
        assert answer.status_code == 403
        assert len((await http.get("/waiting.json")).json()["requests"]) == 2


async def test_another_persons_form_is_refused(cp: Any, client: Client) -> None:
    """A form's token belongs to the person to whom the page was shown."""
    await stock(cp)

    async with client(cp) as http, client(cp, "eve") as other:
        form = await form_of(http)
        assert (await other.post("/waiting/decide", data=form)).status_code == 403


async def test_a_read_only_page_decides_nothing(cp: Any, client: Client) -> None:
    """The server refuses the form, whatever the page shows."""
    await stock(cp)

    async with client(cp) as http, client(cp, read_only=True) as reader:
        form = await form_of(http)
        place = {"id": form["id"], "request": form["request"]}
        shown = await reader.get("/waiting/decide", params=place)
        assert "<form" not in shown.text
        assert (await reader.post("/waiting/decide", data=form)).status_code == 403
        assert len((await http.get("/waiting.json")).json()["requests"]) == 2


async def test_an_async_login_may_refuse(cp: Any) -> None:
    """A service's own login may be async; ``None`` refuses the request."""

    async def authorize(request: object) -> None:
        return None

    transport = httpx.ASGITransport(app=app(cp, authorize=authorize))

    async with httpx.AsyncClient(transport=transport, base_url="http://page") as http:
        assert (await http.get("/threads")).status_code == 403


async def test_a_service_mounts_the_page_behind_its_login(cp: Any) -> None:
    """The links of a mounted page stay below its path, and the login names people."""

    def authorize(request: Request) -> str | None:
        return request.headers.get("x-forwarded-user")

    await stock(cp)
    service = Starlette(routes=[Mount("/agents", app(cp, authorize=authorize))])
    transport = httpx.ASGITransport(app=service)

    async with httpx.AsyncClient(transport=transport, base_url="http://page") as http:
        assert (await http.get("/agents/threads")).status_code == 403
        http.headers["X-Forwarded-User"] = "carla"
        page = await http.get("/agents/waiting")
        own = [link for link in Tags.of(page.text).links if not link.startswith("#")]
        assert all(link.startswith("/agents/") for link in own), own

        for link in own:
            assert (await http.get(link)).status_code == 200, link

        asked = (await http.get("/agents/waiting.json")).json()["requests"][0]
        place = {"id": asked["thread_id"], "request": asked["request"]}
        form = await http.get("/agents/waiting/decide", params=place)
        token = form.text.partition('name="form_token" value="')[2].partition('"')[0]
        answer = await http.post(
            "/agents/waiting/decide",
            data={
                "form_token": token,
                "shown": asked["shown"],
                "decision": "deny",
                **place,
            },
        )
        assert "Recorded: denied by <bdi>carla</bdi>" in answer.text
