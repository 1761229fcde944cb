"""`app`: the page of a store as an ASGI application."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from cpkit.errors import BackendUnavailable, CheckpointerError, InvalidId
from cpkit.foreign_json import encode_text
from cpkit.protocol import Checkpointer
from cpkit.tools import formats
from cpkit.ui import search, session, store, thread, threads, visible, waiting
from cpkit.ui.blocks import rows_of
from cpkit.ui.guard import Authorize, Guard
from cpkit.ui.live import events
from cpkit.ui.markdown import markdown
from cpkit.ui.site import Page, Site, View
from cpkit.ui.timeline import in_order

__all__ = ["app"]

_FOLDER = Path(str(files("cpkit.ui")))

_VIEWS: dict[str, View] = {
    "/threads": threads.threads,
    "/thread": thread.thread,
    "/thread/message": thread.message,
    "/thread/calls": thread.calls,
    "/thread/extra": thread.extra,
    "/session": session.tree,
    "/session/state": session.state,
    "/session/branches": session.branches,
    "/session/fork": session.fork_form,
    "/waiting": waiting.waiting,
    "/waiting/calls": waiting.in_doubt,
    "/waiting/decide": waiting.decision,
    "/waiting/doubt": waiting.doubt,
    "/store": store.store,
}

_POSTS: dict[str, View] = {
    "/waiting/decide": waiting.decide,
    "/waiting/again": waiting.ask_again,
    "/waiting/doubt": waiting.say,
    "/session/fork": session.fork,
}
"""Each view by its path; the path with ``.json`` has the same data."""


def app(
    cp: Checkpointer[Any] | AbstractAsyncContextManager[Checkpointer[Any]],
    *,
    authorize: Authorize,
    read_only: bool = False,
    allowed_hosts: Collection[str] | None = None,
    secret: bytes | None = None,
    title: str = "cpkit",
    url: str | None = None,
    stopping: asyncio.Event | None = None,
) -> ASGIApp:
    """Return the page of an open store, to serve or to mount in a service.

    ``authorize(request)`` returns the name of the person who asks, or ``None`` to
    refuse; it may be async. The name is stored with each decision. ``read_only``
    refuses every decision on the server. ``allowed_hosts`` are accepted values of the
    Host header; ``None`` accepts every host, for a service that checks it itself.
    Processes that serve one page together need the same ``secret``, which protects the
    forms. ``title`` names the store in the page, and ``url`` lets the page show the
    store's schema and size; it is never shown with a password. Set ``stopping`` when
    the server stops: open pages keep connections for their events, and those then end.

    Open the store with ``message_type=Any``, so that the page shows every message. The
    caller closes the store.
    """
    opened: Any = cp  # it is entered before the first request
    site = Site.over(opened, title, url, read_only, stopping or asyncio.Event())
    templates = _environment()
    routes: list[BaseRoute] = [
        Route("/", _to_threads),
        Route("/events", _endpoint_of_events(site)),
        Mount("/static", StaticFiles(directory=_FOLDER / "static")),
        *(
            Route(path, _post(site, templates, view), methods=["POST"])
            for path, view in _POSTS.items()
        ),
    ]

    for path, view in _VIEWS.items():
        routes.append(Route(path, _html(site, templates, view)))
        routes.append(Route(f"{path}.json", _json(site, view)))

    async def on_error(request: Request, exc: Exception) -> Response:
        return _failure(templates, site, request, exc)

    return Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: on_error,
            CheckpointerError: on_error,
        },
        middleware=[
            Middleware(
                Guard,
                authorize=authorize,
                allowed_hosts=allowed_hosts,
                secret=secret or secrets.token_bytes(32),
            )
        ],
    )


@cache
def _environment() -> Environment:
    def finalize(value: Any) -> Any:
        # Markup is HTML that this package made of visible text.
        is_text = isinstance(value, str) and not hasattr(value, "__html__")
        return visible.visible(value) if is_text else value

    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(
        ago=visible.ago,
        bytes=formats.size,
        cut=visible.cut,
        dollars=formats.dollars,
        duration=formats.duration,
        fields=visible.fields,
        markdown=markdown,
        pretty=visible.pretty,
        utc=visible.utc,
    )
    environment.globals.update(
        in_order=in_order,
        rows_of=rows_of,
        AGES=search.AGES,
        LONGEST=visible.LONGEST,
        STATES=search.STATES,
    )
    return environment


Endpoint = Callable[[Request], Awaitable[Response]]


def _html(site: Site, templates: Environment, view: View) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        page, total = await asyncio.gather(
            view(site, request), waiting.total(site, request)
        )
        return _render(site, templates, request, page, total)

    return endpoint


def _json(site: Site, view: View) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        page = await view(site, request)
        return _json_response(dict(page.data), page.status)

    return endpoint


def _post(site: Site, templates: Environment, view: View) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        if site.read_only:
            raise HTTPException(403, "this page is read-only; nothing was decided")

        page = await view(site, request)
        total = await waiting.total(site, request)
        return _render(site, templates, request, page, total)

    return endpoint


def _endpoint_of_events(site: Site) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        return await events(site, request)

    return endpoint


async def _to_threads(request: Request) -> Response:
    return RedirectResponse(f"{request.scope.get('root_path', '')}/threads", 303)


def _render(
    site: Site,
    templates: Environment,
    request: Request,
    page: Page,
    total: int | None = None,
) -> Response:
    """Answer with a page; ``total`` requests wait, which the menu says."""
    root = request.scope.get("root_path", "")

    def link(path: str, /, **parameters: Any) -> str:
        given = {name: value for name, value in parameters.items() if value is not None}
        query = urlencode(given, errors="replace")  # an entry's id may be any text
        return f"{root}{path}?{query}" if given else f"{root}{path}"

    template = templates.get_template(page.template)
    chunks = template.generate(
        page.data,
        site=site,
        link=link,
        total=total,
        here=request.scope["path"].removeprefix(root),
        json_link=link(
            request.scope["path"].removeprefix(root) + ".json",
            **dict(request.query_params),
        ),
        person=getattr(request.state, "person", ""),
        form_token=getattr(request.state, "form_token", ""),
    )
    return _HeadFirst(chunks, page.status)


class _HeadFirst(Response):
    """A page in two parts: the browser loads the style while the second is made."""

    media_type = "text/html"

    def __init__(self, chunks: Iterator[str], status: int) -> None:
        self.status_code = status
        self.background = None
        self._chunks = chunks
        self.init_headers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = []

        for chunk in self._chunks:
            head.append(chunk)

            if "</head>" in chunk:
                break

        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        # Joined, not added: a part is Markup, which would escape the text before it.
        for part, more in ((head, True), (self._chunks, False)):
            body = "".join(part).encode(errors="replace")
            await send({"type": "http.response.body", "body": body, "more_body": more})


def _failure(
    templates: Environment, site: Site, request: Request, exc: Exception
) -> Response:
    """Answer with an error page, or its data."""
    status = 500

    if isinstance(exc, HTTPException):
        status, text = exc.status_code, exc.detail
    else:
        text = str(exc)

        if isinstance(exc, BackendUnavailable):
            status = 503
        elif isinstance(exc, InvalidId):
            status = 400

    if request.scope["path"].endswith(".json"):
        return _json_response({"error": text}, status)

    return _render(
        site, templates, request, Page("error.html", {"error": text}, status)
    )


def _json_response(data: dict[str, Any], status: int) -> Response:
    text = json.dumps(data, ensure_ascii=False, default=str)
    return Response(encode_text(text), status, media_type="application/json")
