"""ACL users, passwords, TLS, Unix sockets, and URLs."""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from redis.asyncio import Redis

import cpkit_redis.store
from conformance.slowdown import slowdown
from cpkit import BackendUnavailable, InvalidURL, ToolCall, open_checkpointer
from cpkit_redis import RedisCheckpointer
from tests.servers.redis import RedisServer, no_tls

Store = RedisCheckpointer[Any]
Servers = Callable[..., RedisServer]

PASSWORD = "s3:cr@t/ %?"


def documented() -> list[str]:
    """Return the ACL rules in the driver's manual, word by word."""
    manual = cpkit_redis.store.__doc__
    assert manual is not None
    found = re.search(r"ACL SETUSER agent on >password ((?:.|\n)*?)\n\n", manual)
    assert found
    return found[1].split()


async def everything(cp: Any) -> None:
    """Use every operation once."""
    assert await cp.append("t", [{}], expected_version=0) == 1
    await cp.save_extra("t", {"a": 1})
    assert await cp.record_issued("t", ToolCall("c", "x", {}, "k")) is None
    assert (await cp.load("t")).pending
    await cp.record_result("t", "c", 1, success=False)
    assert await cp.record_issued("t", ToolCall("c2", "x", {}, "k")) is None
    assert (await cp.record_result("t", "c2", 1)).attempt == 2
    assert await cp.find_completed("k")
    assert len(await cp.list_calls("t")) == 2
    assert len(await cp.list_threads()) == 1
    assert await cp.read("t", -1) == [{}]
    assert await cp.trim("t", 1) == 1
    await cp.delete_thread("t")
    assert len(await cp.list_threads(erased=True)) == 1
    dump = await cp.dump_thread("t")
    await cp.delete_thread("t", forget_keys=True)
    assert await cp.list_calls("t") == []
    await cp.restore_thread(dump)
    await cp.delete_thread("t", forget_keys=True)


@pytest.mark.parametrize("narrow", [False, True], ids=["documented", "no settings"])
async def test_the_documented_permissions_are_enough(
    servers: Servers, narrow: bool
) -> None:
    """A user with the manual's rules can use every operation.

    Without the rules of the last line only the durability is unknown.
    """
    rules = documented()
    assert rules[-2:] == ["+config|get", "+info"]

    if narrow:
        del rules[-2:]

    server = servers(users=[f"user agent on >password {' '.join(rules)}"])
    url = f"redis://agent:password@127.0.0.1:{server.port}/0"

    async with Store(url) as cp, Redis.from_url(server.url) as admin:
        await everything(cp)
        words = cp.durability.words
        assert ("could not be read" in words) == narrow
        denied = await admin.acl_log()
        commands = {str(entry["object"]).lower() for entry in denied}
        assert {word.partition("|")[0] for word in commands} <= {
            "client",  # redis-py introduces itself, and does without
            *(["config", "info"] if narrow else []),
        }


@pytest.mark.parametrize(
    "lacking",
    ["hset", "zadd", "unlink", "rpush", "ltrim", "hdel", "zrem", "set"],
)
async def test_a_user_that_may_not_write_cannot_open_the_store(
    servers: Servers, lacking: str
) -> None:
    """Opening fails, and writes nothing: no operation fails halfway later."""
    rules = [*documented(), f"-{lacking}"]
    server = servers(users=[f"user agent on >password {' '.join(rules)}"])
    url = f"redis://agent:password@127.0.0.1:{server.port}/0"

    with pytest.raises(BackendUnavailable, match="manual of cpkit_redis") as caught:
        async with Store(url):
            pytest.fail("it opened")

    assert not caught.value.maybe_applied

    async with Redis.from_url(server.url) as admin:
        assert await admin.keys() == []


async def test_a_user_of_one_prefix_cannot_use_another(servers: Servers) -> None:
    """Opening a store with another prefix fails."""
    server = servers(users=[f"user agent on >password {' '.join(documented())}"])
    url = f"redis://agent:password@127.0.0.1:{server.port}/0"

    with pytest.raises(BackendUnavailable, match="no permissions"):
        async with Store(url, prefix="other"):
            pytest.fail("it opened")


async def test_a_wrong_password_fails_at_once(servers: Servers) -> None:
    """The handle does not retry what would be refused again."""
    server = servers(password=PASSWORD)

    for login in ("", ":wrong@"):
        with pytest.raises(BackendUnavailable, match=r"(?i)auth|password") as caught:
            async with Store(
                f"redis://{login}127.0.0.1:{server.port}", connect_timeout=60
            ):
                pytest.fail("it opened")

        assert not caught.value.maybe_applied


async def test_a_unix_socket_can_be_used(servers: Servers) -> None:
    """The URL may have a password, and a database in its query."""
    server = servers(password=PASSWORD)

    async with open_checkpointer(f"{server.unix_url}?db=3&prefix=mine") as cp:
        await everything(cp)
        await cp.append("t", [{}])

    async with Redis.from_url(f"{server.url.removesuffix('/0')}/3") as raw:
        assert await raw.llen("{mine}:m:t") == 1


async def test_tls_checks_the_certificate(servers: Servers) -> None:
    """Only a certificate of the authority that the URL names is accepted."""
    if reason := no_tls():
        pytest.skip(f"needs TLS: {reason}")

    server = servers(tls=True, password=PASSWORD)

    async with open_checkpointer(f"{server.tls_url}&prefix=mine") as cp:
        await everything(cp)

    base, _, _ = server.tls_url.partition("?")

    with pytest.raises(BackendUnavailable, match=r"(?i)certificate"):
        async with open_checkpointer(f"{base}?connect_timeout=0.2"):
            pytest.fail("it opened")

    async with open_checkpointer(f"{base}?ssl_cert_reqs=none") as cp:
        await everything(cp)


@pytest.fixture(scope="module")
def tls_server() -> Iterator[RedisServer]:
    if reason := no_tls():
        pytest.skip(f"needs TLS: {reason}")

    with RedisServer(tls=True) as server:
        yield server


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("ssl_ca_certs={tmp}/none", r"No such file .*\(ssl_ca_certs={tmp}/none\)"),
        ("ssl_ca_certs={tmp}", r"Is a directory \(ssl_ca_certs={tmp}\)"),
        ("ssl_ca_certs={tmp}/text", r"no certificate .*\(ssl_ca_certs={tmp}/text\)"),
        ("ssl_ca_path={tmp}/none", r"verify failed.*\(ssl_ca_path={tmp}/none\)"),
        ("ssl_ca_certs={ca}&ssl_certfile={tmp}/c", "No such file .*certfile={tmp}/c"),
        (
            "ssl_ca_certs={ca}&ssl_certfile={ca}&ssl_keyfile={tmp}/k",
            "No such file .*keyfile={tmp}/k",
        ),
        ("", "certificate verify failed.*no ssl_ca_certs"),
    ],
)
async def test_a_fault_of_this_machine_is_named_and_not_retried(
    tls_server: RedisServer, tmp_path: Path, options: str, words: str
) -> None:
    """A missing certificate is not a server that may come up in ten seconds."""
    (tmp_path / "text").write_text("text")
    names = {"tmp": str(tmp_path), "ca": str(tls_server.ca)}
    base, _, _ = tls_server.tls_url.partition("?")

    with pytest.raises(BackendUnavailable, match=words.format(**names)) as caught:
        async with open_checkpointer(f"{base}?{options.format(**names)}"):
            pytest.fail("it opened")

    assert caught.value.rejected
    assert "is the server running" not in str(caught.value)


async def test_a_certificate_that_goes_while_the_store_is_open_is_named(
    tls_server: RedisServer, tmp_path: Path
) -> None:
    """The handle cannot connect again, and says why."""
    authority = tmp_path / "ca.pem"
    authority.write_bytes(tls_server.ca.read_bytes())
    base, _, _ = tls_server.tls_url.partition("?")

    async with (
        open_checkpointer(f"{base}?ssl_ca_certs={authority}&notify=off") as cp,
        Redis.from_url(tls_server.url) as raw,
    ):
        assert await asyncio.gather(cp.append("t", [{}]), cp.load("u"))
        authority.unlink()
        await raw.client_kill_filter(_type="normal", skipme=True)

        with pytest.raises(BackendUnavailable, match=str(authority)) as caught:
            await asyncio.gather(*(cp.load("t") for _ in range(8)))

        assert caught.value.rejected


async def test_a_server_that_wants_a_certificate_says_so(servers: Servers) -> None:
    """It refuses the client after the handshake."""
    if reason := no_tls():
        pytest.skip(f"needs TLS: {reason}")

    server = servers(tls=True, settings={"tls-auth-clients": "yes"})

    with pytest.raises(BackendUnavailable, match="certificate required") as caught:
        async with open_checkpointer(server.tls_url):
            pytest.fail("it opened")

    assert caught.value.rejected


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
async def test_tls_on_one_side_only_is_mentioned(
    tls_server: RedisServer, scheme: str
) -> None:
    """The server hangs up, or waits for the rest of a command."""
    port = tls_server.tls_port if scheme == "redis" else tls_server.port
    url = f"{scheme}://127.0.0.1:{port}?connect_timeout=0.2"

    with pytest.raises(BackendUnavailable, match="with TLS for rediss://"):
        async with open_checkpointer(url):
            pytest.fail("it opened")


@pytest.mark.parametrize("query", [False, True])
async def test_the_password_is_shown_nowhere(
    servers: Servers, caplog: pytest.LogCaptureFixture, query: bool
) -> None:
    """No repr, error, traceback or log shows it."""
    caplog.set_level(logging.DEBUG)
    server = servers(password=PASSWORD)
    quoted = quote(PASSWORD, safe="")
    url = (
        f"redis://127.0.0.1:{server.port}/0?password={quoted}" if query else server.url
    )
    seen = []

    async with open_checkpointer(url, connect_timeout=0.3 * slowdown()) as cp:
        await everything(cp)
        seen.append(repr(cp))
        server.kill()

        for work in (cp.append("t", [{}]), cp.load("t")):
            with pytest.raises(BackendUnavailable) as caught:
                await work

            seen += traceback.format_exception(caught.value)

    for wrong in (f"{url}x" if query else url.replace("/0", "/x"), f"{url}#"):
        with pytest.raises(InvalidURL) as refused:
            open_checkpointer(wrong, nope=1) if query else open_checkpointer(wrong)

        seen += traceback.format_exception(refused.value)

    text = "".join([*seen, caplog.text])
    assert PASSWORD not in text
    assert quoted not in text
    assert "127.0.0.1" in text


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("redis:", "redis://host:6379/0"),
        ("redis://", "redis://host:6379/0"),
        ("redis:/path", "redis://host:6379/0"),
        ("redis+unix://", "three slashes"),
        ("redis+unix://host/path", "three slashes"),
        ("redis://host/name", "number of a database"),
        ("redis://host/1/2", "number of a database"),
        ("redis://host?db=x", "redis-py"),
        ("redis://host:port", "the port is a number"),
        ("redis://host:99999", "the port is a number"),
        ("redis://host?ssl_ca_certs=x", "redis-py"),
        ("rediss://host?ssl_cert_reqs=maybe", "redis-py"),
        ("redis://host?prefix=", "prefix"),
        ("redis://host?prefix={a}", "prefix"),
        ("redis://host?pool_size=0", "pool_size"),
        ("redis://host?timeout=0", "timeout"),
        ("redis://host?timeout=inf", "timeout"),
        ("redis://host?connect_timeout=nan", "connect_timeout"),
        ("redis://host?socket_timeout=1", "no option 'socket_timeout'"),
        ("redis://host?decode_responses=1", "no option 'decode_responses'"),
    ],
)
def test_a_url_that_cannot_be_used_says_so(url: str, advice: str) -> None:
    """``InvalidURL`` is raised before any connection is made."""
    with pytest.raises(InvalidURL, match=re.escape(advice)):
        open_checkpointer(url)


def test_a_url_for_the_class_itself_is_checked_too() -> None:
    """An option of redis-py that the driver sets itself raises ``InvalidURL``."""
    with pytest.raises(InvalidURL, match="socket_timeout"):
        Store("redis://host?socket_timeout=1")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:pw@example:7000/3", "redis://example:7000/3?prefix=cpkit"),
        ("rediss://example", "rediss://example:6379/0?prefix=cpkit"),
        ("redis+unix:///run/r?db=1", "redis+unix:///run/r?db=1&prefix=cpkit"),
        ("redis://example?prefix=a", "redis://example:6379/0?prefix=a"),
        ("redis://[::1]:1/2", "redis://[::1]:1/2?prefix=cpkit"),
    ],
)
def test_a_handle_shows_its_address(url: str, shown: str) -> None:
    """The repr has scheme, host, database and prefix."""
    assert repr(open_checkpointer(url)) == f"<Handle {shown}>"
