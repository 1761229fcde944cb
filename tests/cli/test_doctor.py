"""``cpkit doctor``: check that a store works, and advise what to change."""

from __future__ import annotations

import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from redis import Redis

from cpkit import Survives
from cpkit.cli.stores import Store
from cpkit.driver import file_system
from cpkit_file.schema import register_name
from cpkit_redis.space import dead_space
from tests.cli.command import call, in_store, invoke, run_main
from tests.mounts import small_disk
from tests.servers.redis import RedisServer
from tests.stores import fresh_url


async def ids(cp: Store) -> list[str]:
    return [one.thread_id for one in await cp.list_threads()]


def test_a_store_is_examined(url: str) -> None:
    """The report has version, durability, threads and the oldest pending call."""

    async def fill(cp: Store) -> None:
        await cp.append("a", [{"n": 1}])
        await call(cp, "b", "c", "k")

    in_store(url, fill)
    ended = run_main("doctor", url, "--json")
    assert (ended.code, ended.err) == (0, "")
    found = ended.json
    assert (found["schema_version"], found["threads"]) == (1, 2)
    assert found["survives"] in ("process", "machine")
    assert found["oldest_pending"]["thread_id"] == "b"
    assert found["probe"]["ok"]
    assert "written, read and deleted" in found["probe"]["words"]
    assert in_store(url, ids) == ["a", "b"]

    spared = invoke("doctor", url, "--read-only")
    assert spared.code == 0
    assert "skipped" in spared.out
    assert "durability" in spared.out


def test_the_longest_threads_are_named(sqlite_url: str) -> None:
    """With the command that cuts them; what was cut does not count."""

    async def fill(cp: Store) -> None:
        await cp.append("long", [{}] * 10_000)
        await cp.append("cut", [{}] * 20_000)
        await cp.trim("cut", 19_999)
        await cp.append("short", [{}])

    in_store(sqlite_url, fill)
    found = invoke("doctor", sqlite_url, "--json").json
    assert found["longest_threads"] == [
        {"thread_id": "long", "messages": 10_000},
        {"thread_id": "cut", "messages": 1},
        {"thread_id": "short", "messages": 1},
    ]
    out = invoke("doctor", sqlite_url).out
    assert "longest     long (10000 messages), cut (1 message)" in out
    assert "--prefix long --keep-last 1000 --dry-run" in out


def test_the_largest_threads_are_named(sqlite_url: str) -> None:
    """By about how many bytes they have, and with what helps."""
    text, part = "x" * 1000, "y" * 1_000_000

    async def fill(cp: Store) -> None:
        await cp.append("talks", [{"text": text}] * 11_000, extra={"k": text})
        await cp.append("short", [{}])

        for n in range(12):
            await call(cp, "calls", f"c{n}", f"k{n}")
            await cp.record_result("calls", f"c{n}", part)

    in_store(sqlite_url, fill)
    found = invoke("doctor", sqlite_url, "--json").json["largest_threads"]
    assert [one["thread_id"] for one in found] == ["calls", "talks", "short"]
    assert found[0]["calls"] > 12_000_000
    assert found[0]["keys"] > 12 * len("c1k1")
    assert found[1]["messages"] == 11_000 * len('{"text":""}' + text)
    assert found[1]["extra"] == len('{"k":""}' + text)
    out = invoke("doctor", sqlite_url).out
    assert "largest     calls (about 12.0 MB: 100 % calls), talks (about 11.1 MB" in out
    assert "--prefix calls --calls-older-than 30d --dry-run" in out
    assert out.count("--prefix talks --keep-last 1000") == 1


def test_free_space_is_told(sqlite_url: str) -> None:
    """What a deletion freed is in the file until a VACUUM."""

    async def fill_and_delete(cp: Store) -> None:
        await cp.append("large", [{"text": "x" * 100_000}])
        await cp.append("small", [{}])
        await cp.delete_thread("large")

    in_store(sqlite_url, fill_and_delete)
    assert "VACUUM gives them to the disk" in invoke("doctor", sqlite_url).out


def test_what_a_killed_trim_left_is_told(tmp_path: Path) -> None:
    """The command that is named removes it."""
    url = f"file://{tmp_path}/agent"

    async def fill(cp: Store) -> None:
        await cp.append("t", [{"text": "x"}])

    in_store(url, fill)
    assert "left over" not in invoke("doctor", url).out
    [log] = (tmp_path / "agent/threads").iterdir()
    Path(f"{log}.tmp").write_text("x" * 5_000)
    fact = invoke("doctor", url, "--json").json["facts"]["left over"]
    assert fact.startswith("5,000 bytes of writes that a crash cut short")
    subprocess.run(fact.partition(": ")[2], shell=True, check=True)
    assert "left over" not in invoke("doctor", url).out
    assert log.exists()


def test_dead_space_of_a_server_is_told() -> None:
    """What was deleted is in the append-only file until the server rewrites it."""
    server = RedisServer()
    server.start()

    async def fill_and_delete(cp: Store) -> None:
        await cp.append("large", [{"text": "x" * 5_000_000}] * 4)
        await cp.delete_thread("large")

    try:
        in_store(server.url, fill_and_delete)
        facts = invoke("doctor", server.url, "--json").json["facts"]
    finally:
        server.close()

    assert "BGREWRITEAOF frees what counts no more" in facts["append-only file"]


def test_memory_that_a_server_does_not_use_is_told() -> None:
    """INFO of a server that had four times as much, and of a new one."""
    info = {"used_memory": "50000000", "mem_fragmentation_bytes": "150000000"}
    assert "150,000,000 bytes" in dead_space(info)["memory"]
    assert "MEMORY PURGE" in dead_space(info)["memory"]
    new = {"used_memory": "900000", "mem_fragmentation_bytes": "7000000"}
    assert dead_space(new) == {}
    assert dead_space({}) == {}


def test_a_store_is_created_on_request(tmp_path: Path) -> None:
    """A store in memory is examined without that option."""
    url = fresh_url("sqlite", tmp_path)
    assert invoke("doctor", url).code == 3
    code = int(file_system(str(tmp_path)).survives is not Survives.MACHINE)
    assert invoke("doctor", url, "--create").code == code
    out = invoke("doctor", url).out
    is_plain = not file_system(str(tmp_path)).advice
    assert ("advice      none" in out) is is_plain
    assert "sqlite:///agent.db" in invoke("doctor", "memory://").out


def test_advice_is_given(tmp_path: Path) -> None:
    """The report names relaxed durability, and a file that other users can read."""
    url = fresh_url("sqlite", tmp_path)
    assert invoke("doctor", url, "--create").code == 0
    (tmp_path / "store.db").chmod(0o644)
    ended = invoke("doctor", f"{url}?durability=normal", "--json")
    assert ended.code == 1  # less than the default
    found = ended.json
    assert found["settings"]["synchronous"] == "NORMAL"
    assert any("durability=normal" in one for one in found["advice"])
    assert any("chmod" in one for one in found["advice"])


def test_limits_are_printed_where_they_are_lowered(tmp_path: Path) -> None:
    """JSON always has them."""
    url = fresh_url("sqlite", tmp_path)
    found = invoke("doctor", url, "--create", "--json").json
    assert (found["max_payload"], found["max_append"]) == (16 * 2**20, 64 * 2**20)
    assert "limits  " not in invoke("doctor", url).out
    lowered = invoke("doctor", f"{url}?max_append=4096").out
    assert "limits      max_append=4096 bytes\n" in lowered


@pytest.mark.parametrize(
    ("appendonly", "said", "code"),
    [(False, "appendonly yes", 1), (True, "appendfsync always", 0)],
)
def test_redis_without_a_durable_log_gets_advice(
    appendonly: bool, said: str, code: int
) -> None:
    """The report has the command that turns the log on; without one the code is 1."""
    with RedisServer(appendonly=appendonly) as server:
        ended = invoke("doctor", server.url, "--create")
        assert ended.code == code
        assert said in ended.out
        is_weak = "none, less than this store's default: process" in ended.out
        assert is_weak == (code == 1)


def test_a_replica_is_named_as_one() -> None:
    """It is refused, with the address of its primary and the state of the link."""
    with (
        RedisServer() as first,
        RedisServer(settings={"replicaof": f"127.0.0.1 {first.port}"}) as second,
    ):
        ended = invoke("doctor", second.url, "--create")
        assert ended.code == 3
        assert f"is a replica of 127.0.0.1:{first.port} (its link is " in ended.err


def test_damage_that_ends_the_list_is_a_finding(tmp_path: Path) -> None:
    """The advice is a command that works then."""
    url = fresh_url("file", tmp_path)

    async def fill(cp: Store) -> None:
        for thread_id in ("other", "Broken:7"):
            await cp.append(thread_id, [{}])

    in_store(url, fill)
    [log] = tmp_path.rglob("threads/broken-7*.jsonl")
    log.write_bytes(log.read_bytes().replace(b"Broken", b"Bbbken", 1))
    found = invoke("doctor", url, "--json")
    assert (found.code, found.json["threads"]) == (1, None)
    assert str(log) in found.json["damaged"][0]
    [advice] = [one for one in found.json["advice"] if "backup" in one]
    assert "export" in advice
    assert invoke("export", url).code != 0
    assert '"other"' in invoke("export", url, "other").out
    shown = invoke("doctor", url).out
    assert "pending " not in shown
    assert "THREAD" in shown


def test_damaged_calls_are_a_finding(damaged_url: str, tmp_path: Path) -> None:
    """The report names the thread and covers the others; the exit code is 1."""

    with closing(sqlite3.connect(tmp_path / "store.db")) as raw, raw:
        raw.execute("UPDATE cpkit_calls SET issued_at = 1 WHERE thread_id = 'c'")

    ended = invoke("doctor", damaged_url, "--json")
    assert ended.code == 1
    found = ended.json
    [damage] = found["damaged"]
    assert damage.startswith("thread 'broken' is corrupt at call 'broken'")
    assert (found["threads"], found["oldest_pending"]["thread_id"]) == (3, "c")
    assert found["probe"]["ok"]

    shown = invoke("doctor", damaged_url)
    assert shown.code == 1
    assert "damaged     thread 'broken' is corrupt" in shown.out
    assert "cpkit export" in shown.out


def test_a_list_that_is_damaged_is_a_finding(tmp_path: Path) -> None:
    """A log whose first line is damaged does not say of which thread it is."""
    url = fresh_url("file", tmp_path)

    async def fill(cp: Store) -> None:
        await cp.append("t", [{}])

    in_store(url, fill)
    [log] = (tmp_path / "store" / "threads").iterdir()
    log.write_bytes(b"x" + log.read_bytes()[1:])
    found = invoke("doctor", url, "--json")
    assert (found.code, found.json["probe"]["ok"]) == (1, True)
    assert str(log) in found.json["damaged"][0]


@pytest.mark.parametrize("url", ["sqlite:///{}/agent.db", "file://{}/store"])
def test_a_place_that_is_weak_and_nearly_full_is_a_finding(
    tmp_path: Path, url: str
) -> None:
    """Its type and its danger, and the space and the files that are left."""
    with small_disk(tmp_path / "small", 4096) as place:
        ended = invoke("doctor", url.format(place), "--create", "--json")
        assert ended.code == 1
        found = ended.json
        assert (found["survives"], found["is_weak"]) == ("process", True)
        assert found["settings"]["file_system"] == "tmpfs"
        assert "files" in found["facts"]["space left"]
        advice = " ".join(found["advice"])
        assert f"{place} is in memory (tmpfs)" in advice
        assert "left: a full disk refuses every write" in advice
        shown = invoke("doctor", url.format(place))
        assert "process, less than this store's default: machine" in shown.out
        assert "space left" in shown.out


def test_the_check_of_the_engine_finds_damage(tmp_path: Path) -> None:
    """SQLite's own, which the reads of doctor do not meet."""
    url = fresh_url("sqlite", tmp_path)

    async def fill(cp: Store) -> None:
        await cp.append("t", [{"pad": "x" * 900}] * 200)

    in_store(url, fill)
    path = tmp_path / "store.db"

    assert invoke("doctor", url, "--json", "--check").json["damaged"] == []
    data = bytearray(path.read_bytes())
    middle = len(data) // 8192 * 4096  # a page of messages
    data[middle : middle + 96] = b"\xff" * 96
    path.write_bytes(data)
    assert invoke("doctor", url, "--json", "--read-only").json["damaged"] == []
    ended = invoke("doctor", url, "--json", "--read-only", "--check")
    assert ended.code == 1
    assert str(path) in ended.json["damaged"][0]


def test_keys_without_calls_and_calls_without_keys_are_counted(tmp_path: Path) -> None:
    """The first are harmless, and the cure of the others is named and works."""
    url = fresh_url("file", tmp_path)

    async def fill(cp: Store) -> None:
        for name in ("kept", "forgotten", "lost"):
            await call(cp, name, "c", name)

        await cp.delete_thread("forgotten", forget_keys=True)

    in_store(url, fill)
    home = tmp_path / "store"
    register = home / "used-keys" / register_name("lost")
    register.write_bytes(b"")
    found = invoke("doctor", url, "--json", "--read-only").json
    assert found["facts"]["void keys"].startswith("1 lines")
    [advice] = [one for one in found["advice"] if "used-keys" in one]
    assert advice.startswith("1 calls, such as 'c' in thread 'lost'")
    (home / "cpkit.json").touch()
    cured = invoke("doctor", url, "--json", "--read-only").json
    assert not [one for one in cured["advice"] if "used-keys" in one]
    assert register.read_bytes()


def test_the_check_reads_all_lines_of_files(tmp_path: Path) -> None:
    """Also those of a register that no read of doctor meets."""
    url = fresh_url("file", tmp_path)

    async def fill(cp: Store) -> None:
        await call(cp, "t", "c", "key")

    in_store(url, fill)
    register = tmp_path / "store" / "used-keys" / register_name("key")
    register.write_bytes(register.read_bytes().replace(b"key", b"KEY", 1))
    assert invoke("doctor", url, "--json", "--read-only").json["damaged"] == []
    ended = invoke("doctor", url, "--json", "--read-only", "--check")
    assert ended.code == 1
    assert str(register) in ended.json["damaged"][0]


def test_the_check_follows_every_key(tmp_path: Path) -> None:
    """A key that an eviction took could be claimed again, and no operation notices."""

    async def fill(cp: Store) -> None:
        for name in ("kept", "failed", "lost"):
            await call(cp, name, "c", name)

        await cp.record_result("failed", "c", "no", success=False)
        await cp.delete_thread("lost")

    with RedisServer() as server:
        in_store(server.url, fill)

        with Redis.from_url(server.url) as raw:
            raw.delete("{cpkit}:k:lost", "{cpkit}:k:failed")

        assert invoke("doctor", server.url, "--json").json["damaged"] == []
        ended = invoke("doctor", server.url, "--json", "--check")
        assert ended.code == 1
        [damage] = ended.json["damaged"]
        assert damage.startswith("call 'c' of thread 'lost' has lost its key 'lost'")
