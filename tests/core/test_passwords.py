"""No message, repr, log or traceback shows a password, whatever its spelling."""

from __future__ import annotations

import logging
import traceback
from urllib.parse import quote

import pytest

from cpkit import InvalidURL, open_checkpointer
from cpkit.registry import redacted

HEAD, TAIL = "zq9x", "k7wv"

# Text between the two halves of a password; each has a meaning in a URL.
BETWEEN = ["", "@", ":", "/", "//", "?", "#", "%", "%zz", "&", "=", "?a=", "@h?a=", " "]

SERVERS = "postgresql postgres redis rediss redis+unix redis+cluster".split()

URLS = [
    "{scheme}://user:{password}@localhost:1/0",
    "{scheme}://:{password}@localhost:1/0",
    "{scheme}://user@corp:{password}@localhost:1/0",
    "{scheme}://user:{password}@localhost:1/0?max_payload=x",
    "{scheme}://user:{password}@localhost:1/0?nope=1",
    "{scheme}://user:{password}@localhost:port/0",
    "{scheme}://user:{password}@local host/0",
]
BROKEN_URLS = [
    "nope://user:{password}@host/db",
    "postgresql//user:{password}@host/db",
    "//user:{password}@host/db",
    " postgresql://user:{password}@host/db",
    "user:{password}@host/db",
    "/user:{password}@host/db",
    "postgresql://user:{password}@host/db#fragment",
]


def shown_for(url: str) -> str:
    """Return every text about a handle, or about the error that prevented it."""
    try:
        handle = open_checkpointer(url)
    except InvalidURL as exc:
        # Of a frame a traceback shows source alone, which has no password.
        causes = traceback.format_exception(exc, limit=0)
        return f"{exc} {exc!r} {''.join(causes)}"

    return f"{handle} {handle!r}"


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("scheme", SERVERS)
def test_a_password_is_shown_nowhere(
    scheme: str, between: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Escaped correctly or not, in a valid URL and in an invalid one."""
    caplog.set_level(logging.DEBUG)
    secret = f"{HEAD}{between}{TAIL}"

    for password in {secret, quote(secret, safe="")}:
        for url in URLS:
            text = shown_for(url.format(scheme=scheme, password=password))
            assert HEAD not in text
            assert TAIL not in text

    assert HEAD not in caplog.text
    assert TAIL not in caplog.text


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("url", BROKEN_URLS)
def test_a_password_in_a_broken_url_is_shown_nowhere(url: str, between: str) -> None:
    """A typing error in the URL does not print it either."""
    text = shown_for(url.format(password=f"{HEAD}{between}{TAIL}"))
    assert HEAD not in text
    assert TAIL not in text


@pytest.mark.parametrize("name", ["password", "sslpassword", "PASSWD", "pwd"])
def test_a_password_in_the_query_is_hidden(name: str) -> None:
    """Client libraries accept a password there too."""
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
def test_the_rest_of_a_url_stays_readable(url: str, shown: str) -> None:
    """A reader of the error needs the scheme, the user, the host and the database."""
    assert redacted(url) == shown
