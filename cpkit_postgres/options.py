"""What a store on Postgres can be told, and which URLs name one."""

from __future__ import annotations

import re
import warnings
from typing import Annotated, Literal

from pydantic import AfterValidator, PositiveFloat, PositiveInt

from cpkit.errors import InvalidURL
from cpkit.registry import DriverOptions

__all__ = ["CLIENT_PARAMETERS", "PostgresOptions", "check_url"]

CLIENT_PARAMETERS = frozenset(
    # What asyncpg reads itself …
    "database dbname gsslib host krbsrvname passfile password port service sslcert "
    "sslcrl sslkey sslmode sslnegotiation sslpassword sslrootcert "
    "ssl_max_protocol_version ssl_min_protocol_version target_session_attrs user "
    # … and settings that it hands to the server.
    "application_name default_transaction_isolation lock_timeout options "
    "statement_timeout synchronous_commit".split()
)

_HOST = re.compile(r"(\[[^][]*\]|[^:@/]*)(:[0-9]*)?")


def _schema_name(name: str) -> str:
    # Postgres cuts a longer one short, and two stores would be one.
    if not 0 < len(name.encode()) <= 63 or "\0" in name:
        raise ValueError("a schema's name has 1 to 63 bytes of UTF-8 and no NUL")

    return name


with warnings.catch_warnings():
    # The option is called what Postgres calls it. pydantic warns that a deprecated
    # method of its models has that name; nobody calls it on these.
    warnings.filterwarnings("ignore", 'Field name "schema"', UserWarning)

    class PostgresOptions(DriverOptions):
        """The driver's manual explains them; times are in seconds."""

        schema: Annotated[str, AfterValidator(_schema_name)] = "cpkit"  # type: ignore[assignment]  # see above
        pooler: Literal["session", "transaction"] = "session"
        pool_size: PositiveInt = 8
        connect_timeout: PositiveFloat = 10.0
        command_timeout: PositiveFloat = 60.0


def check_url(url: str) -> None:
    """Raise ``InvalidURL`` for a URL that asyncpg would cut in the wrong place.

    What it took for a host, a port or a database could be a part of the password, and
    show in an error.
    """
    scheme, slashes, rest = url.partition("://")
    login, _, place = rest.partition("?")[0].rpartition("@")
    hosts = place.partition("/")[0].split(",")

    if scheme.lower() not in ("postgresql", "postgres") or not slashes:
        raise InvalidURL("write postgresql://user:password@host:port/database")

    if "@" in login or "/" in login:
        raise InvalidURL(
            "postgresql: in a user name, a password and a database name write '@' as "
            "%40 and '/' as %2F"
        )

    if not all(_HOST.fullmatch(host) for host in hosts):
        raise InvalidURL(
            "postgresql: after the user comes host:port, or several with commas"
        )
