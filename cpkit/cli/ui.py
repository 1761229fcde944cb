"""``cpkit ui``: serve the page of a store on localhost."""

from __future__ import annotations

import getpass
import os
import webbrowser
from typing import Annotated

import typer

from cpkit.cli.output import print_json, write
from cpkit.cli.running import BadUse, run
from cpkit.cli.stores import (
    Json,
    Url,
    display_url,
    is_volatile,
    open_store,
    store_url,
)
from cpkit.registry import MissingExtra, needs_extra

__all__ = ["ui"]

Host = Annotated[
    str,
    typer.Option(
        help="The address to listen on. With 0.0.0.0 other machines can connect; give "
        "the name in their links as --allow-host."
    ),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A name or address of this machine, or of a proxy in front of it, that "
        "links may have; with :PORT if a proxy has another one. Repeatable.",
    ),
]
Port = Annotated[
    int,
    typer.Option(help="The port to listen on; 0 takes a free one.", min=0, max=65535),
]
ReadOnly = Annotated[
    bool, typer.Option("--read-only", help="Refuse decisions on the server.")
]
Open = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]
By = Annotated[
    str | None,
    typer.Option(
        help="Your name; it is stored with each decision.", show_default="$USER"
    ),
]


def ui(
    url: Url = None,
    host: Host = "127.0.0.1",
    port: Port = 8420,
    allow_host: AllowHost = None,
    read_only: ReadOnly = False,
    open_page: Open = False,
    by: By = None,
    json: Json = False,
) -> None:
    """Serve a page that shows the store, and where a person decides.

    Prints a link with a secret token. A person with the link can read and decide.
    Ctrl-C stops the server.
    """
    if not host:
        raise BadUse("--host is empty; is a variable not set?")

    for name in allow_host or ():
        if not name or "/" in name:
            raise BadUse(f"--allow-host {name!r} is not a host: write agents.example")

    person = by or _user()

    try:
        person.encode()
    except UnicodeEncodeError:  # it could not be stored with a decision
        raise BadUse(f"your name is {person!r}, which is not text: use --by") from None

    place = store_url(url)
    run(_serve(place, host, port, allow_host or [], read_only, open_page, person, json))


async def _serve(
    url: str,
    host: str,
    port: int,
    allowed_hosts: list[str],
    read_only: bool,
    open_page: bool,
    person: str,
    json: bool,
) -> None:
    try:
        with needs_extra("cpkit ui", "ui"):
            from cpkit.ui.serve import serve
    except MissingExtra as exc:
        raise BadUse(str(exc)) from exc

    if is_volatile(url):
        raise BadUse(
            f"{display_url(url)} lives in its own process, and this command cannot "
            "see it; in that process, serve cpkit.ui.app(checkpointer, authorize=…), "
            "or use the URL of a store that processes share"
        )

    def on_ready(link: str) -> None:
        if json:
            print_json({"url": link})
        else:
            write(f"{display_url(url)} is at\n  {link}\nPress Ctrl-C to stop.\n")

        if open_page:
            webbrowser.open(link)

    async with open_store(url) as cp:
        try:
            await serve(
                cp,
                host=host,
                port=port,
                allowed_hosts=allowed_hosts,
                person=person,
                read_only=read_only,
                title=display_url(url),
                url=url,
                on_ready=on_ready,
            )
        except OSError as exc:
            raise BadUse(f"cannot listen on {host}:{port}: {exc.strerror}") from exc


def _user() -> str:
    """Return the name of the user, or the number: in a container it may lack a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # before Python 3.13 a KeyError
        return f"user {os.getuid()}"
