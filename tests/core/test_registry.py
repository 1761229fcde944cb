"""Opening by URL: the store that it selects, and the message for each mistake."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cpkit import (
    CheckpointerError,
    InvalidURL,
    MemoryCheckpointer,
    open_checkpointer,
)
from cpkit.driver import Handle
from cpkit.registry import DEFAULT_URL, driver_names, url_path

SCHEMES = (
    "file memory postgres postgresql redis redis+cluster redis+unix rediss "
    "rediss+cluster sqlite"
).split()
SQLITE_OPTIONS = (
    "busy_timeout, durability, max_append, max_payload, notify, poll, strict_roundtrip"
)

DRIVER = """
from cpkit import MemoryCheckpointer
from cpkit.registry import DriverOptions

class AcmeOptions(DriverOptions):
    colour: str = "red"

class AcmeCheckpointer(MemoryCheckpointer):
    Options = AcmeOptions
    client_options = frozenset({"ssl", "max_payload"})

    @classmethod
    def from_url(cls, url, *, message_type, options):
        self = cls(url, message_type=message_type)
        self.url, self.options = url, options
        return self
"""


def mistake(url: str | None, **options: Any) -> str:
    """Return the message for a URL or an option that cannot be used."""
    with pytest.raises(InvalidURL) as raised:
        open_checkpointer(url, **options)

    return str(raised.value)


def installed(folder: Path, package: str, scheme: str, module: str) -> None:
    """Write a package's metadata as an installer does."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\n")
    (info / "entry_points.txt").write_text(
        f"[cpkit.drivers]\n{scheme} = {module}:AcmeCheckpointer\n"
    )


# Which store


def test_the_drivers_of_this_project_are_known() -> None:
    """``cpkit drivers`` lists at least these, sorted."""
    assert set(SCHEMES) <= set(driver_names())
    assert driver_names() == sorted(driver_names())


@pytest.mark.parametrize(
    ("environment", "shown"),
    [(None, "cpkit.db"), ("", "cpkit.db"), ("memory://env", "memory://env")],
)
def test_without_a_url_the_environment_or_the_default_is_used(
    environment: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``CPKIT_URL`` unless it is empty; otherwise a file in the working folder."""
    if environment is None:
        monkeypatch.delenv("CPKIT_URL", raising=False)
    else:
        monkeypatch.setenv("CPKIT_URL", environment)

    assert shown in repr(open_checkpointer())
    assert "memory://given" in repr(open_checkpointer("memory://given"))


def test_opening_touches_nothing_before_the_context_is_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The URL is checked by the call; the store is created by the context."""
    monkeypatch.chdir(tmp_path)
    open_checkpointer(DEFAULT_URL)
    assert not list(tmp_path.iterdir())


def test_an_installed_package_adds_a_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its options are checked; the options of its client stay in the URL."""
    (tmp_path / "acme_driver.py").write_text(DRIVER)
    installed(tmp_path, "acme", "acme+tls", "acme_driver")
    monkeypatch.syspath_prepend(tmp_path)

    assert "acme+tls" in driver_names()
    url = "Acme+TLS://h/p?ssl=a%26b&colour=blue&ssl=2&max_payload=9"
    cp: Any = open_checkpointer(url)
    assert cp.url == "Acme+TLS://h/p?ssl=a%26b&ssl=2"
    assert (cp.options.colour, cp.options.max_payload) == ("blue", 9)
    assert "colour, max_append, max_payload, notify, poll, strict" in mistake(
        "acme+tls://h?x=1"
    )


# Mistakes


@pytest.mark.parametrize("url", ["nope://x", "NOPE://x", "nope:x", "sqlite3:///x"])
def test_the_message_for_an_unknown_scheme_lists_the_known_ones(url: str) -> None:
    """The list has every installed driver."""
    said = mistake(url)
    assert repr(url.partition(":")[0].lower()) in said
    assert all(scheme in said for scheme in SCHEMES)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("", DEFAULT_URL),
        ("://x", DEFAULT_URL),
        ("1a://x", DEFAULT_URL),
        ("agent.db", "'sqlite:///agent.db' for SQLite, 'file:agent.db'"),
        ("/tmp/a.db", "'sqlite:////tmp/a.db' for SQLite, 'file:///tmp/a.db'"),
    ],
)
def test_the_message_for_a_path_without_a_scheme_shows_a_url(
    url: str, shown: str
) -> None:
    """The message has the path, and a URL that names it."""
    said = mistake(url)
    assert repr(url) in said
    assert shown in said


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlit:///a.db", "did you mean 'sqlite'?"),
        ("postgre://h/d", "did you mean 'postgres'?"),
        ("postgresql+asyncpg://h/d", "write 'postgresql://' without '+asyncpg'"),
        ("sqlite+aiosqlite:///a.db", "write 'sqlite://' without '+aiosqlite'"),
        ("sqlite:///a.db?durabilty=full", "did you mean 'durability'?"),
    ],
)
def test_the_message_for_a_misspelled_word_has_the_closest_one(
    url: str, shown: str
) -> None:
    """For schemes, for options, and for the schemes of SQLAlchemy."""
    assert shown in mistake(url)


async def test_a_handle_that_is_not_entered_with_async_with_says_so() -> None:
    """The error has the line to write."""
    wrong: Any = open_checkpointer("memory://")

    with pytest.raises(TypeError, match="write 'async with open_checkpointer"):
        await wrong

    with pytest.raises(TypeError, match="write 'async with open_checkpointer"), wrong:
        raise AssertionError("the block does not run")


@pytest.mark.parametrize("url", [b"memory://", 1, Path("x.db")])
def test_a_url_is_a_string(url: Any) -> None:
    """Another type is refused, not converted."""
    assert type(url).__name__ in mistake(url)


@pytest.mark.parametrize("how", ["query", "keyword"])
def test_the_message_for_an_unknown_option_lists_the_valid_ones(how: str) -> None:
    """A misspelled option is never ignored."""
    if how == "query":
        said = mistake("sqlite:///x.db?durabillity=full")
    else:
        said = mistake("sqlite:///x.db", durabillity="full")

    assert "'durabillity'" in said
    assert SQLITE_OPTIONS in said


@pytest.mark.parametrize(
    ("name", "value", "fragment"),
    [
        ("max_payload", "many", "valid integer"),
        ("max_payload", "0", "greater than 0"),
        ("strict_roundtrip", "perhaps", "valid boolean"),
        ("durability", "high", "'full' or 'normal'"),
        ("busy_timeout", "inf", "less than or equal to"),
        ("busy_timeout", "nan", "Input should be"),
        ("busy_timeout", "0", "greater than 0"),
        ("busy_timeout", "", "valid number"),
    ],
)
def test_the_message_for_a_wrong_value_names_the_option_and_valid_values(
    name: str, value: str, fragment: str
) -> None:
    """In the query and as a keyword; the message does not repeat the value."""
    for said in (
        mistake(f"sqlite:///x.db?{name}={value}"),
        mistake("sqlite:///x.db", **{name: value}),
    ):
        assert f"'{name}'" in said
        assert fragment in said
        assert value not in ("many", "perhaps", "high") or value not in said


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("sqlite:///x?durability=full&durability=normal", {}),
        ("sqlite:///x?max_payload=1", {"max_payload": 2}),
        ("sqlite:///x?durability=full", {"durability": "normal"}),
    ],
)
def test_two_values_for_one_option_are_refused(
    url: str, options: dict[str, Any]
) -> None:
    """Neither value silently wins."""
    assert "given twice" in mistake(url, **options)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("sqlite:///x?max_payload=1&max_payload=1", {}),
        ("sqlite:///x?max_payload=1", {"max_payload": 1}),
        ("sqlite:///x?strict_roundtrip=1", {"strict_roundtrip": True}),
        ("sqlite:///x?", {"busy_timeout": 5}),
    ],
)
def test_the_same_value_twice_is_accepted(url: str, options: dict[str, Any]) -> None:
    """The parsed values are compared, not their spelling."""
    assert isinstance(open_checkpointer(url, **options), Handle)


@pytest.mark.parametrize("query", ["a", "max_payload", "&", "max_payload=1&"])
def test_a_query_has_names_and_values(query: str) -> None:
    """Any other part of a query is refused, not ignored."""
    assert "name=value" in mistake(f"sqlite:///x.db?{query}")


@pytest.mark.parametrize(
    "query", ["prefix=%ff", "%fe=1", "prefix=a%c3", "password=%ff"]
)
@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
def test_an_escape_in_a_query_is_utf_8(scheme: str, query: str) -> None:
    """Otherwise two spellings would be one prefix, and name one store."""
    assert "not UTF-8" in mistake(f"{scheme}://h:1?{query}")


@pytest.mark.parametrize("query", ["=", "=1", "message_type=dict", "url=x"])
def test_an_argument_of_the_function_is_not_a_url_option(query: str) -> None:
    """A URL cannot set the message type, for instance."""
    assert "has no option" in mistake(f"sqlite:///x.db?{query}")


@pytest.mark.parametrize(
    ("scheme", "client", "extra"),
    [
        ("postgresql", "asyncpg", "postgres"),
        ("redis", "redis", "redis"),
        ("file", "aiofiles", "file"),
    ],
)
def test_the_message_for_a_missing_client_library_has_the_pip_line(
    scheme: str, client: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is installed, its client library is not."""
    for module in list(sys.modules):
        if module.partition(".")[0] in (f"cpkit_{extra}", client):
            monkeypatch.delitem(sys.modules, module)

    monkeypatch.setitem(sys.modules, client, None)
    said = mistake(f"{scheme}:///x")
    assert f"pip install 'cpkit[{extra}]'" in said
    assert client in said


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import acme_client_library", "install acme_client_library"),
        (
            "from cpkit import Missing",
            "cannot be imported: cannot import name 'Missing'",
        ),
    ],
)
def test_the_message_for_another_packages_driver_says_what_is_missing(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No extra of cpkit installs it, even if its module is called ``cpkit_…``."""
    (tmp_path / "cpkit_acme.py").write_text(f"{code}\n")
    installed(tmp_path, "acme", "acme", "cpkit_acme")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cpkit_acme", raising=False)
    said = mistake("acme://x")
    assert words in said
    assert ("install" in said) == ("import acme" in code)
    assert "cpkit[" not in said


def test_a_constructor_checks_its_options() -> None:
    """A checkpointer that is built without a URL has the same checks."""
    for options in ({"max_payload": 0}, {"nope": 1}):
        with pytest.raises(ValidationError):
            MemoryCheckpointer[Any](None, **options)


# Paths


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///agent.db", "agent.db"),
        ("sqlite:///a/b.db", "a/b.db"),
        ("sqlite:////var/a.db", "/var/a.db"),
        ("sqlite:///:memory:", ":memory:"),
        ("SQLite:///a.db", "a.db"),
        ("sqlite:///a%20b%3F%23%25.db", "a b?#%.db"),
        ("sqlite:///%C3%A9+%2B.db", "é++.db"),
        ("sqlite:///a@b:c.db?durability=normal", "a@b:c.db"),
    ],
)
def test_a_path_of_sqlite(url: str, path: str) -> None:
    """Three slashes: relative; four: absolute. Escapes are decoded, ``+`` is kept."""
    assert repr(open_checkpointer(url)) == f"<Handle sqlite:///{path}>"


@pytest.mark.parametrize(
    ("url", "fragment"),
    [
        ("sqlite:", "sqlite:///relative.db"),
        ("sqlite://", "sqlite:///relative.db"),
        ("sqlite:///", "sqlite:///relative.db"),
        ("sqlite:agent.db", "sqlite:///relative.db"),
        ("sqlite:/agent.db", "sqlite:///relative.db"),
        ("sqlite://agent.db", "three slashes"),
        ("sqlite://agent.db/x", "three slashes"),
        ("sqlite:///a#b.db", "%23"),
        ("sqlite:///a%00.db", "%00"),
        ("sqlite:///a%ff.db", "UTF-8"),
        ("sqlite:///a.db?x=a@b", "%40"),
        ("memory:", "memory://name"),
        ("memory:name", "memory://name"),
    ],
)
def test_the_message_for_an_invalid_path_shows_what_to_write(
    url: str, fragment: str
) -> None:
    """For instance for a wrong number of slashes."""
    assert fragment in mistake(url)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:dir", "dir"),
        ("file:./dir", "./dir"),
        ("file:/dir", "/dir"),
        ("file:///dir", "/dir"),
        ("file:///a%2Fb%20c", "/a/b c"),
    ],
)
def test_a_local_path(url: str, path: str) -> None:
    """The part after the scheme, or after the empty host."""
    assert url_path(url) == path


def test_every_mistake_is_a_checkpointer_error() -> None:
    """A caller can catch one root class."""
    with pytest.raises(CheckpointerError):
        open_checkpointer("nope://x")
