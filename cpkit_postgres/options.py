"""The options of a store on Postgres, and its URL as asyncpg takes it."""

from __future__ import annotations

import re
import warnings
from ssl import get_default_verify_paths
from typing import Annotated, Literal
from urllib.parse import parse_qsl, urlencode

from pydantic import AfterValidator, PositiveInt

from cpkit.driver import ServerOptions
from cpkit.errors import InvalidURL

CLIENT_PARAMETERS = frozenset(
    # What asyncpg reads itself,
    "database dbname gsslib host krbsrvname passfile password port service sslcert "
    "sslcrl sslkey sslmode sslnegotiation sslpassword sslrootcert "
    "ssl_max_protocol_version ssl_min_protocol_version target_session_attrs user "
    # and settings that it passes to the server.
    "application_name default_transaction_isolation lock_timeout options "
    "statement_timeout synchronous_commit".split()
)

# What hosted services put into their URLs for other clients; it has no effect here.
_OF_OTHERS = frozenset(
    "binary_parameters channel_binding client_encoding connection_limit "
    "default_query_exec_mode fallback_application_name gssencmode keepalives "
    "keepalives_count keepalives_idle keepalives_interval load_balance_hosts pgbouncer "
    "pool_max_conns pool_timeout prepareThreshold prepared_statement_cache_size "
    "prepared_statements socket_timeout ssl sslaccept sslcompression sslsni "
    "statement_cache_size supa uselibpqcompat workaround".split()
)
CLIENT_PARAMETERS |= _OF_OTHERS

# Several hosts with commas, each a name, an IPv4 or a bracketed IPv6 address.
_HOST = r"(\[[^][]*\]|[^:@/?,]*)(:[0-9]{0,5})?"
_URL = re.compile(
    rf"(?is)postgres(ql)?://([^@/?]*@)?{_HOST}(,{_HOST})*(/[^@?]*)?(\?.*)?"
)


def _schema_name(name: str) -> str:
    # Postgres cuts a longer name, and two stores would be the same one.
    if not 0 < len(name.encode()) <= 63 or "\0" in name:
        raise ValueError("a schema's name has 1 to 63 bytes of UTF-8 and no NUL")

    return name


with warnings.catch_warnings():
    # The option has Postgres's own name. pydantic warns that a deprecated method of its
    # models has that name too; cpkit does not call it.
    warnings.filterwarnings("ignore", 'Field name "schema"', UserWarning)

    class PostgresOptions(ServerOptions):
        """The manual in `cpkit_postgres.store` explains them."""

        schema: Annotated[str, AfterValidator(_schema_name)] = "cpkit"  # type: ignore[assignment]  # see above
        pooler: Literal["auto", "session", "transaction"] = "auto"
        pool_size: PositiveInt = 8


def as_pasted(url: str, options: PostgresOptions) -> tuple[str, PostgresOptions]:
    """Return a URL without the parameters of other clients, and the options.

    ``pgbouncer=true`` is ``pooler=transaction``, ``ssl=true`` is ``sslmode=require``.
    The authorities of the system are OpenSSL's file, which asyncpg does not look for.

    Raises ``InvalidURL`` where asyncpg would divide the URL in the wrong place: what it
    takes for a port could be a part of the password, and would show in an error.
    """
    if not _URL.fullmatch(url):
        raise InvalidURL(
            "write postgresql://user:password@host:port/database; in a user name, a "
            "password and a database name '@' is %40, '/' is %2F and '?' is %3F"
        )

    base, _, query = url.partition("?")
    given = dict(parse_qsl(query, keep_blank_values=True))

    if given.get("pgbouncer") == "true" and options.pooler == "auto":
        options = options.model_copy(update={"pooler": "transaction"})

    if given.get("ssl") in ("true", "require"):
        given.setdefault("sslmode", "require")

    if given.get("sslrootcert") == "system":
        given["sslrootcert"] = get_default_verify_paths().openssl_cafile

    kept = {name: value for name, value in given.items() if name not in _OF_OTHERS}
    return f"{base}?{urlencode(kept)}" if kept else base, options


def next_host_first(url: str) -> tuple[str, int]:
    """Return a checked URL with its first host behind the others, and their number."""
    base, question, query = url.partition("?")
    start = max(base.rfind("@"), base.find("://") + 2) + 1
    hosts, slash, database = base[start:].partition("/")
    first, *others = hosts.split(",")
    turned = ",".join([*others, first])
    return f"{base[:start]}{turned}{slash}{database}{question}{query}", len(others) + 1
