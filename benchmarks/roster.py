"""The contenders on each store, and how to create them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from benchmarks.floors import FileFloor, PostgresFloor, RedisFloor, SQLiteFloor
from benchmarks.once import Ours, OursWithoutSync
from benchmarks.place import Place
from cpkit.tools.benchmark import Contender

__all__ = ["FLOOR", "FULL_STATE", "CPKIT", "ROSTER", "Entry", "entry"]

FLOOR = "floor"
CPKIT = "cpkit"
FULL_STATE = ("LangGraph AsyncSqliteSaver", "LangGraph AsyncPostgresSaver")


@dataclass(frozen=True)
class Entry:
    """How to create a contender; a peer raises ImportError if it is not installed."""

    driver: str
    name: str
    make: Callable[[Place], Contender]


def _peer(module: str, name: str) -> Any:
    return getattr(import_module(f"benchmarks.peers.{module}"), name)


def _langgraph(driver: str, name: str, **kind: bool) -> Entry:
    def make(place: Place) -> Contender:
        where = place.postgres

        if driver == "sqlite":
            where = place.file("-".join(["langgraph", *kind]) + ".db")

        made: Contender = _peer("langgraph", "LangGraph")(driver, where, name, **kind)
        return made

    return Entry(driver, name, make)


def _other(
    driver: str, name: str, module: str, cls: str, where: Callable[[Place], str]
) -> Entry:
    def make(place: Place) -> Contender:
        made: Contender = _peer(module, cls)(driver, where(place), name)
        return made

    return Entry(driver, name, make)


def _ledger(place: Place) -> Contender:
    made: Contender = _peer("agent_ledger", "AgentLedger")(
        place.postgres, "agent-ledger"
    )
    return made


def _guard(name: str, module: str, cls: str) -> Entry:
    """Return a library that guards functions, on a SQLite file of its own."""

    def make(place: Place) -> Contender:
        made: Contender = _peer(module, cls)(place.file(f"{name}.db"), name)
        return made

    return Entry("sqlite", name, make)


ROSTER = (
    Entry("sqlite", FLOOR, lambda p: SQLiteFloor(p.file("floor.db"), FLOOR)),
    Entry(
        "sqlite",
        "floor, clustered key",
        lambda p: SQLiteFloor(
            p.file("floor-clustered.db"), "floor, clustered key", clustered=True
        ),
    ),
    Entry(
        "sqlite",
        CPKIT,
        lambda p: Ours("sqlite", f"sqlite:///{p.file('cpkit.db')}"),
    ),
    _langgraph("sqlite", "LangGraph AsyncSqliteSaver"),
    _langgraph("sqlite", "LangGraph, delta channel", delta=True),
    _langgraph("sqlite", "LangGraph, plain dicts", plain=True),
    _other(
        "sqlite",
        "OpenAI AsyncSQLiteSession",
        "agents",
        "AgentsSession",
        lambda p: p.file("agents.db"),
    ),
    _other(
        "sqlite",
        "OpenAI SQLiteSession",
        "agents",
        "AgentsSession",
        lambda p: p.file("agents-blocking.db"),
    ),
    _other(
        "sqlite", "cubeloop", "cubeloop", "Cubeloop", lambda p: p.file("cubeloop.db")
    ),
    Entry(
        "sqlite",
        "cpkit, durability=normal",
        lambda p: OursWithoutSync(
            "sqlite",
            f"sqlite:///{p.file('cpkit-process.db')}?durability=normal",
            name="cpkit, durability=normal",
        ),
    ),
    _guard("exactly-once", "exactly_once", "ExactlyOnce"),
    _guard("ledger-once", "ledger_once", "LedgerOnce"),
    Entry("postgres", FLOOR, lambda p: PostgresFloor(p.postgres, FLOOR)),
    Entry(
        "postgres",
        CPKIT,
        lambda p: Ours("postgres", f"{p.postgres}?schema=cpkit_bench"),
    ),
    _langgraph("postgres", "LangGraph AsyncPostgresSaver"),
    _langgraph("postgres", "LangGraph, delta channel", delta=True),
    _langgraph("postgres", "LangGraph, plain dicts", plain=True),
    _other(
        "postgres",
        "OpenAI SQLAlchemySession",
        "agents_postgres",
        "AgentsPostgres",
        lambda p: p.postgres,
    ),
    _other("postgres", "cubeloop", "cubeloop", "Cubeloop", lambda p: p.postgres),
    Entry("postgres", "agent-ledger", _ledger),
    Entry("redis", FLOOR, lambda p: RedisFloor("redis", p.redis, FLOOR)),
    Entry("redis", CPKIT, lambda p: Ours("redis", f"{p.redis}?prefix=cpkit-bench")),
    _other(
        "redis", "OpenAI RedisSession", "agents", "AgentsSession", lambda p: p.redis
    ),
    Entry(
        "redis-always",
        FLOOR,
        lambda p: RedisFloor("redis-always", p.redis_always, FLOOR),
    ),
    Entry("redis-always", CPKIT, lambda p: Ours("redis-always", p.redis_always)),
    _other(
        "redis-always",
        "OpenAI RedisSession",
        "agents",
        "AgentsSession",
        lambda p: p.redis_always,
    ),
    Entry("file", FLOOR, lambda p: FileFloor(p.file("floor"), FLOOR)),
    Entry("file", CPKIT, lambda p: Ours("file", f"file://{p.file('cpkit')}")),
)


def entry(driver: str, name: str) -> Entry:
    """Return the entry of that name."""
    return next(e for e in ROSTER if (e.driver, e.name) == (driver, name))
