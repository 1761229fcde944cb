"""Opening by URL: what is found, and what each mistake is told."""

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

OURS = "file memory postgres postgresql redis redis+unix rediss sqlite".split()
SQLITE_OPTIONS = "busy_timeout, durability, max_append, max_payload, strict_roundtrip"

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
    """Return what is said about a URL or an option that cannot be used."""
    with pytest.raises(InvalidURL) as raised:
        open_checkpointer(url, **options)

    return str(raised.value)


def installed(folder: Path, package: str, scheme: str, module: str) -> None:
    """Lay out a package's metadata as an installer does."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\n")
    (info / "entry_points.txt").write_text(
        f"[cpkit.drivers]\n{scheme} = {module}:AcmeCheckpointer\n"
    )


# Which store


def test_the_drivers_of_this_project_are_known() -> None:
    """``cpkit drivers`` has these at least."""
    assert set(OURS) <= set(driver_names())
    assert driver_names() == sorted(driver_names())


@pytest.mark.parametrize(
    ("environment", "shown"),
    [(None, "cpkit.db"), ("", "cpkit.db"), ("memory://env", "memory://env")],
)
def test_without_a_url_the_environment_counts_and_then_the_default(
    environment: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``CPKIT_URL``, unless it is empty, else one file in the working folder."""
    if environment is None:
        monkeypatch.delenv("CPKIT_URL", raising=False)
    else:
        monkeypatch.setenv("CPKIT_URL", environment)

    assert shown in repr(open_checkpointer())
    assert "memory://given" in repr(open_checkpointer("memory://given"))


def test_opening_touches_nothing_before_the_context_is_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The URL is checked when the function is called, the store is made later."""
    monkeypatch.chdir(tmp_path)
    open_checkpointer(DEFAULT_URL)
    assert not list(tmp_path.iterdir())


def test_a_package_adds_a_scheme_by_being_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its options are checked like ours, and its client's are left in the URL."""
    (tmp_path / "acme_driver.py").write_text(DRIVER)
    installed(tmp_path, "acme", "acme+tls", "acme_driver")
    monkeypatch.syspath_prepend(tmp_path)

    assert "acme+tls" in driver_names()
    url = "Acme+TLS://h/p?ssl=a%26b&colour=blue&ssl=2&max_payload=9"
    cp: Any = open_checkpointer(url)
    assert cp.url == "Acme+TLS://h/p?ssl=a%26b&ssl=2"
    assert (cp.options.colour, cp.options.max_payload) == ("blue", 9)
    assert "colour, max_append, max_payload, strict_roundtrip" in mistake(
        "acme+tls://h?x=1"
    )


# Mistakes


@pytest.mark.parametrize("url", ["nope://x", "NOPE://x", "nope:x", "sqlite3:///x"])
def test_an_unknown_scheme_is_told_the_known_ones(url: str) -> None:
    """The list has what is installed."""
    said = mistake(url)
    assert repr(url.partition(":")[0].lower()) in said
    assert all(scheme in said for scheme in OURS)


@pytest.mark.parametrize("url", ["", "agent.db", "/tmp/agent.db", "://x", "1a://x"])
def test_a_path_without_a_scheme_is_told_what_to_write(url: str) -> None:
    """The likely mend is in the message."""
    said = mistake(url)
    assert repr(url) in said
    assert DEFAULT_URL in said


@pytest.mark.parametrize("url", [b"memory://", 1, Path("x.db")])
def test_a_url_is_a_string(url: Any) -> None:
    """Nothing is guessed from another type."""
    assert type(url).__name__ in mistake(url)


@pytest.mark.parametrize("how", ["query", "keyword"])
def test_an_unknown_option_is_told_the_valid_ones(how: str) -> None:
    """A misspelled option never passes in silence."""
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
def test_an_ill_typed_option_is_named_with_what_it_takes(
    name: str, value: str, fragment: str
) -> None:
    """The same for the query and for keywords, and the value is not repeated."""
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
def test_an_option_given_twice_differently_is_refused(
    url: str, options: dict[str, Any]
) -> None:
    """Neither of the two wins in silence."""
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
def test_an_option_given_twice_alike_is_taken(
    url: str, options: dict[str, Any]
) -> None:
    """What counts is the value, not how it was written."""
    assert isinstance(open_checkpointer(url, **options), Handle)


@pytest.mark.parametrize("query", ["a", "max_payload", "&", "max_payload=1&"])
def test_a_query_is_of_names_and_values(query: str) -> None:
    """What is neither is not passed over."""
    assert "name=value" in mistake(f"sqlite:///x.db?{query}")


@pytest.mark.parametrize("query", ["=", "=1", "message_type=dict", "url=x"])
def test_what_only_python_can_say_is_no_option(query: str) -> None:
    """A URL cannot name a type."""
    assert "has no option" in mistake(f"sqlite:///x.db?{query}")


@pytest.mark.parametrize(
    ("scheme", "client", "extra"),
    [
        ("sqlite", "aiosqlite", "sqlite"),
        ("postgresql", "asyncpg", "postgres"),
        ("redis", "redis", "redis"),
        ("file", "aiofiles", "file"),
    ],
)
def test_a_driver_that_is_not_installed_is_told_the_pip_line(
    scheme: str, client: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is known, its client library is missing, and the mend is one line."""
    for module in list(sys.modules):
        if module.partition(".")[0] in (f"cpkit_{extra}", client):
            monkeypatch.delitem(sys.modules, module)

    monkeypatch.setitem(sys.modules, client, None)
    said = mistake(f"{scheme}:///x")
    assert f"pip install 'cpkit[{extra}]'" in said
    assert client in said


def test_a_strangers_driver_that_lacks_something_is_told_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its module is called, it is no extra of ours."""
    (tmp_path / "cpkit_acme.py").write_text("import acme_client_library\n")
    installed(tmp_path, "acme", "acme", "cpkit_acme")
    monkeypatch.syspath_prepend(tmp_path)
    said = mistake("acme://x")

    assert "install acme_client_library" in said
    assert "cpkit[" not in said


def test_a_slip_in_an_option_of_the_class_is_a_value_error() -> None:
    """Built directly, a checkpointer checks its options as well."""
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
    """Three slashes are relative, four absolute; escapes are decoded, '+' is itself."""
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
def test_a_path_that_is_none_is_told_what_to_write(url: str, fragment: str) -> None:
    """The number of slashes is a mistake that everybody makes once."""
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
    """What follows the scheme, or the empty host."""
    assert url_path(url) == path


def test_every_mistake_is_one_of_ours() -> None:
    """One root to catch."""
    with pytest.raises(CheckpointerError):
        open_checkpointer("nope://x")
