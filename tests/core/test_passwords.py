"""A password is in no message, repr, log or traceback, however it was written."""

from __future__ import annotations

import logging
import traceback
from urllib.parse import quote

import pytest

from cpkit import InvalidURL, open_checkpointer
from cpkit.registry import redacted

HEAD, TAIL = "zq9x", "k7wv"

# What goes between the halves of a password: each means something in a URL.
BETWEEN = ["", "@", ":", "/", "//", "?", "#", "%", "%zz", "&", "=", "?a=", "@h?a=", " "]

SERVERS = ["postgresql", "postgres", "redis", "rediss", "redis+unix"]

URLS = [
    "{scheme}://user:{password}@localhost:1/0",
    "{scheme}://:{password}@localhost:1/0",
    "{scheme}://user@corp:{password}@localhost:1/0",
    "{scheme}://user:{password}@localhost:1/0?max_payload=x",
    "{scheme}://user:{password}@localhost:1/0?nope=1",
    "{scheme}://user:{password}@localhost:port/0",
    "{scheme}://user:{password}@local host/0",
]
NO_URLS = [
    "nope://user:{password}@host/db",
    "postgresql//user:{password}@host/db",
    "//user:{password}@host/db",
    " postgresql://user:{password}@host/db",
    "user:{password}@host/db",
    "/user:{password}@host/db",
    "postgresql://user:{password}@host/db#fragment",
]


def said(url: str) -> str:
    """Return all that can be read about a handle, or about why there is none."""
    try:
        handle = open_checkpointer(url)
    except InvalidURL as exc:
        return f"{exc} {exc!r} {''.join(traceback.format_exception(exc))}"

    return f"{handle} {handle!r}"


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("scheme", SERVERS)
def test_a_password_is_shown_nowhere(
    scheme: str, between: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Escaped as it should be or not, in a URL that opens and in one that does not."""
    caplog.set_level(logging.DEBUG)
    secret = f"{HEAD}{between}{TAIL}"

    for password in {secret, quote(secret, safe="")}:
        for url in URLS:
            text = said(url.format(scheme=scheme, password=password))
            assert HEAD not in text
            assert TAIL not in text

    assert HEAD not in caplog.text
    assert TAIL not in caplog.text


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("url", NO_URLS)
def test_a_password_in_what_is_no_url_is_shown_nowhere(url: str, between: str) -> None:
    """A typing error does not print it either."""
    text = said(url.format(password=f"{HEAD}{between}{TAIL}"))
    assert HEAD not in text
    assert TAIL not in text


@pytest.mark.parametrize("name", ["password", "sslpassword", "PASSWD", "pwd"])
def test_a_password_in_the_query_is_hidden(name: str) -> None:
    """Client libraries take one there too."""
    assert redacted(f"x://h/d?{name}={HEAD}&a=1") == f"x://h/d?{name}=***&a=1"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:pw@host:6379/0", "redis://user:***@host:6379/0"),
        ("redis://:pw@host", "redis://:***@host"),
        ("redis://user@host:6379/0", "redis://user@host:6379/0"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("sqlite:///a@b.db", "sqlite:///a@b.db"),
        ("redis+unix://:pw@/run/r.sock", "redis+unix://:***@/run/r.sock"),
    ],
)
def test_what_is_no_password_stays_readable(url: str, shown: str) -> None:
    """Scheme, user, host and database are what one looks for in an error."""
    assert redacted(url) == shown
