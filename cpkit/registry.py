"""Opening a store by URL.

Drivers are found through the entry-point group ``cpkit.drivers``, so a package adds a
URL scheme by being installed. An entry point names a store's class, as
`cpkit.driver.StoreDriver` describes it, or a class that implements the checkpointer
itself, as `Driver` does::

    [project.entry-points."cpkit.drivers"]
    lmdb = "my_package:LMDBStore"
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    NamedTuple,
    Protocol,
    TypeVar,
    cast,
    overload,
)
from urllib.parse import parse_qsl, unquote, urlencode

from pydantic import ValidationError

from cpkit.driver.abilities import handle_over
from cpkit.driver.hash_check import CheckedStore
from cpkit.driver.store import (
    DriverOptions,
    Findings,
    Store,
    StoreDriver,
    StoreInfo,
)
from cpkit.errors import InvalidURL
from cpkit.keyring import Keyring
from cpkit.protocol import Checkpointer, FullCheckpointer, JsonCheckpointer

if TYPE_CHECKING:
    import typing_extensions as t

    # A type that is not a class, such as a union. Before mypy 1.19 it becomes Any.
    FormT = t.TypeVar("FormT", default=Any)

__all__ = [
    "DEFAULT_URL",
    "Driver",
    "DriverOptions",
    "MissingExtra",
    "driver_names",
    "examine_store",
    "inspect_store",
    "is_one_process",
    "needs_extra",
    "open_checkpointer",
    "redacted",
    "url_path",
]

MessageT = TypeVar("MessageT")

DEFAULT_URL = "sqlite:///cpkit.db"
GROUP = "cpkit.drivers"


class Driver(Protocol):
    """A class that implements the checkpointer itself, without a store."""

    Options: ClassVar[type[DriverOptions]]
    """The model that the options are checked against."""

    client_options: ClassVar[frozenset[str]]
    """Query parameters to leave in the URL, for the client library's own parser."""

    @classmethod
    def from_url(
        cls, url: str, *, message_type: Any, options: Any
    ) -> AbstractAsyncContextManager[Checkpointer[Any]]:
        """Return an unopened handle, or raise ``InvalidURL``; do no I/O.

        ``options`` is an instance of ``Options``; what it took from the query is not
        in the URL any more.
        """
        ...


class _Parsed(NamedTuple):
    """A URL without the driver's options, the options, and the driver."""

    url: str
    options: DriverOptions
    driver: type[StoreDriver] | type[Driver]


@overload
def open_checkpointer(
    url: str | None = None, *, message_type: type[MessageT], **options: Any
) -> AbstractAsyncContextManager[FullCheckpointer[MessageT]]: ...
@overload
def open_checkpointer(
    url: str | None = None, *, message_type: t.TypeForm[FormT], **options: Any
) -> AbstractAsyncContextManager[FullCheckpointer[FormT]]: ...
@overload
def open_checkpointer(
    url: str | None = None, *, message_type: Any, **options: Any
) -> AbstractAsyncContextManager[FullCheckpointer[Any]]: ...
@overload
def open_checkpointer(
    url: str | None = None, **options: Any
) -> AbstractAsyncContextManager[JsonCheckpointer]: ...
def open_checkpointer(
    url: str | None = None,
    *,
    message_type: Any = dict,
    keyring: Keyring | str | os.PathLike[str] | None = None,
    **options: Any,
) -> AbstractAsyncContextManager[Any]:
    """Return a context manager that opens the store behind a URL.

    Its type has every optional protocol, as the stores of cpkit do. A store of another
    package may lack some: ask with ``isinstance``, for instance `ListsThreads`.

    Without a URL, ``CPKIT_URL`` counts, and without that ``sqlite:///cpkit.db``.
    ``message_type`` is ``dict`` (JSON objects) or any type that pydantic validates.
    Options stand in the URL's query or are given by keyword; they are checked now, the
    store is connected to, created and migrated when the context is entered.

    With a ``keyring`` every value is encrypted (``docs/privacy.md``). It is a
    `cpkit.keyring.Keyring`, the path of one, or ``env:NAME`` for a variable that has
    one. Without it ``CPKIT_KEYRING`` counts, which is such a text.

    Raises ``InvalidURL`` for an unknown scheme, a driver that is not installed, an
    unknown, ill-typed or contradictory option, and a keyring that cannot be read.
    Entering raises ``BackendUnavailable`` or ``SchemaMismatch``, and ``InvalidURL`` for
    a keyring that hashes idempotency keys otherwise than the store has them.
    """
    parsed = _parse(url, options)
    ring = os.environ.get("CPKIT_KEYRING") if keyring is None else keyring

    if hasattr(parsed.driver, "commit"):
        store = cast("type[StoreDriver]", parsed.driver).from_url(*parsed[:2])

        if ring is not None:
            store = _sealed(store, ring)

        return handle_over(store, message_type=message_type, options=parsed.options)

    if ring is not None:
        raise InvalidURL(f"{redacted(parsed.url)!r}: this driver takes no keyring")

    driver = cast("type[Driver]", parsed.driver)
    return driver.from_url(
        parsed.url, message_type=message_type, options=parsed.options
    )


def _sealed(store: Store, keyring: Keyring | str | os.PathLike[str]) -> Store:
    with needs_extra("a keyring", "privacy"):
        import_module("cryptography")

    return CheckedStore(store, keyring)


async def inspect_store(url: str) -> StoreInfo | None:
    """Tell whether the store of a URL exists, without creating anything.

    ``None`` where its driver cannot tell. Raises as `open_checkpointer` does.
    """
    parsed = _parse(url, {})
    inspect = getattr(parsed.driver, "inspect", None)

    if inspect is None:
        return None

    found: StoreInfo | None = await inspect(*parsed[:2])
    return found


async def examine_store(url: str, *, whole: bool) -> Findings:
    """Look for damage in the store of a URL, and count what is worth knowing.

    Looks at a part of it, or at the ``whole``, with the engine's own check. Raises as
    `open_checkpointer` does.
    """
    parsed = _parse(url, {})
    examine = getattr(parsed.driver, "examine", None)
    return Findings() if examine is None else await examine(*parsed[:2], whole)


def is_one_process(url: str) -> bool:
    """Return whether only one process may open the store of a URL."""
    return bool(getattr(_parse(url, {}).driver, "one_process", False))


def _parse(url: str | None, options: dict[str, Any]) -> _Parsed:
    """Find the driver of a URL, and check the options against it."""
    if url is None:
        url = os.environ.get("CPKIT_URL") or DEFAULT_URL

    if not isinstance(url, str):
        raise InvalidURL(f"a URL is a str, not {type(url).__name__}")

    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*(?=:)", url)

    if scheme is None:
        raise InvalidURL(f"{redacted(url)!r} has no scheme; {_with_scheme(url)}")

    if "#" in url:
        raise InvalidURL(f"{redacted(url)!r}: write '#' as %23")

    base, _, query = url.partition("?")

    # A password with a bare '?' looks like this, and its end would pass for an option.
    if "@" in query:
        raise InvalidURL(
            f"{redacted(url)!r}: write '@' after the '?' as %40, or the '?' as %3F"
        )

    driver = _find_driver(scheme[0].lower())
    asked, rest = _split_query(query, driver, scheme[0])
    checked = _check_options(driver, scheme[0], asked, options)
    return _Parsed(f"{base}?{urlencode(rest)}" if rest else base, checked, driver)


def driver_names() -> list[str]:
    """Return the schemes that the installed packages offer, sorted."""
    return sorted(_offered(tuple(sys.path)))


def redacted(url: str) -> str:
    """Return a URL for people to read, without its passwords.

    Hides from the first ``:`` after the scheme to the last ``@``, so that a password
    with unescaped characters in it, or in a URL without its scheme, stays hidden too.
    """
    url = re.sub(r"(?s)^((?>[^:/]*:?//|)[^:]*):.*@", r"\1:***@", url)
    return re.sub(r"(?i)((?:password|passwd|pwd)=)[^&]*", r"\1***", url)


def url_path(url: str) -> str:
    """Return the decoded path of a URL that names a local file or folder.

    Returns what follows ``scheme://`` and its empty host, or ``scheme:``. A driver
    that reads ``scheme:///relative`` as a relative path removes the first slash.
    """
    _, _, rest = url.partition(":")

    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")

        if host:
            raise InvalidURL(
                f"{redacted(url)!r} names a host; a local path has three slashes"
            )

        rest = slash + path

    try:
        decoded = unquote(rest, errors="strict")
    except UnicodeDecodeError:
        raise InvalidURL(f"{redacted(url)!r}: %-escapes are UTF-8") from None

    if "\0" in decoded:
        raise InvalidURL("a path cannot contain %00")

    return decoded


def _find_driver(scheme: str) -> type[StoreDriver] | type[Driver]:
    entry = _find_entry_point(scheme)

    try:
        driver: type[StoreDriver] | type[Driver] = entry.load()
    except MissingExtra as exc:
        raise InvalidURL(f"the driver for {scheme!r} is not installed: {exc}") from exc
    except ModuleNotFoundError as exc:
        raise InvalidURL(
            f"the driver for {scheme!r} is not installed ({exc}): install {exc.name}"
        ) from exc
    except ImportError as exc:
        reason = f"the driver for {scheme!r} cannot be imported: {exc}"
        raise InvalidURL(reason) from exc

    return driver


@cache
def _offered(path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Return the drivers by scheme; this reads every installed package's list."""
    found: dict[str, EntryPoint] = {}

    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, entry)

    return found


def _find_entry_point(scheme: str) -> EntryPoint:
    if scheme not in _offered(tuple(sys.path)):
        _offered.cache_clear()  # its package may have been installed just now

    found = _offered(tuple(sys.path)).get(scheme)

    if found is None:
        base, plus, client = scheme.partition("+")

        if plus and base in driver_names():
            advice = f"write {base + '://'!r} without {plus + client!r}"
        else:
            advice = f"{_did_you_mean(scheme, driver_names())}installed are: " + (
                ", ".join(driver_names())
            )

        raise InvalidURL(f"no driver for {scheme!r}; {advice}")

    return found


def _with_scheme(url: str) -> str:
    """Return what to write in place of a URL without a scheme."""
    if re.fullmatch(r"[\w./ -]*\w", url):  # the path of a file or a folder
        folder = f"file://{url}" if url.startswith("/") else f"file:{url}"
        return f"write {'sqlite:///' + url!r} for SQLite, {folder!r} for files"

    return f"write {DEFAULT_URL!r} or another of: {', '.join(driver_names())}"


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question with the known word that is closest, or an empty text."""
    close = get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _split_query(
    query: str, driver: type[StoreDriver] | type[Driver], scheme: str
) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Divide a query into the driver's options and the client library's."""
    asked: dict[str, str] = {}
    rest = []

    try:
        pairs = parse_qsl(
            query,
            keep_blank_values=True,
            strict_parsing=bool(query),
            errors="strict",
        )
    except UnicodeDecodeError:
        raise InvalidURL(
            f"the %-escapes in the options of the {scheme} URL are not UTF-8"
        ) from None
    except ValueError:
        raise InvalidURL(
            f"the options in the {scheme} URL are not of the form name=value"
        ) from None

    for name, value in pairs:
        if name in driver.client_options and name not in driver.Options.model_fields:
            rest.append((name, value))
        elif asked.setdefault(name, value) != value:
            raise InvalidURL(f"option {name!r} is given twice, with different values")

    return asked, rest


def _check_options(
    driver: type[StoreDriver] | type[Driver],
    scheme: str,
    asked: dict[str, str],
    given: dict[str, Any],
) -> DriverOptions:
    known = driver.Options.model_fields

    for name in (*asked, *given):
        if name not in known:
            raise InvalidURL(
                f"{scheme} has no option {name!r}; {_did_you_mean(name, known)}"
                f"it has: {', '.join(sorted(known))}"
            )

    try:
        from_url = driver.Options.model_validate(asked)
        by_keyword = driver.Options.model_validate(given)
    except ValidationError as exc:
        problems = "; ".join(
            f"option {'.'.join(map(str, e['loc']))!r}: {e['msg']}"
            for e in exc.errors(include_input=False, include_url=False)
        )
        # Not chained: the cause would show what was put in.
        raise InvalidURL(f"{scheme}: {problems}") from None

    for name in asked.keys() & given.keys():
        if getattr(from_url, name) != getattr(by_keyword, name):
            raise InvalidURL(f"option {name!r} is given twice, with different values")

    return from_url.model_copy(update=by_keyword.model_dump(include=set(given)))


class MissingExtra(ModuleNotFoundError):
    """A package is not installed; the message has the pip command."""

    def __init__(self, part: str, extra: str, name: str) -> None:
        super().__init__(part, extra, name, name=name)
        self.part = part
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.part} needs {self.name}: pip install 'cpkit[{self.extra}]'"

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[object, ...]]:
        return type(self), self.args


@contextmanager
def needs_extra(part: str, extra: str) -> Iterator[None]:
    """Raise `MissingExtra` where an import in the block misses a package."""
    try:
        yield
    except MissingExtra:
        raise
    except ModuleNotFoundError as exc:
        # A missing module of cpkit itself is a broken installation.
        if not exc.name or exc.name.startswith(("cpkit", "conformance")):
            raise

        raise MissingExtra(part, extra, exc.name.partition(".")[0]) from exc
