"""Operations that overlap in any way have an outcome that an order of them has.

`tests.file.schedules` has the orders of their system calls. What is right is what the
store in memory does with one operation after the other.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest

from cpkit.driver import (
    Append,
    Claim,
    Erase,
    Resolve,
    Restore,
    StoredCall,
    StoreFailure,
    Trim,
    Write,
)
from cpkit.memory import MemoryStore
from cpkit.records import CallStatus
from cpkit_file import keys, schema, store, writing
from cpkit_file.lines import Line, claimed, header, sealed
from cpkit_file.log import Folder
from cpkit_file.schema import log_name, register_name
from tests.file.schedules import Killed, explore, fail_at, kill_before, patched
from tests.model import without_times
from tests.sweeps import sweep


class Read(NamedTuple):
    """A question, and the id of a thread or the key that it is about."""

    kind: str
    about: str = ""


Operation: TypeAlias = Write | Read


def append(thread_id: str, expected: int | None = None) -> Append:
    return Append(thread_id, [b'{"n":1}'], expected)


def claim(thread_id: str, call_id: str, key: str = "k") -> Claim:
    return Claim(thread_id, call_id, "tool", b"{}", key)


def resolve(thread_id: str, call_id: str, status: CallStatus = "failed") -> Resolve:
    return Resolve(thread_id, call_id, status, b"5")


def restore(thread_id: str, *attempts: int, key: str = "k") -> Restore:
    """Return a thread with failed attempts at a key."""
    calls = [
        StoredCall(
            thread_id, f"r{one}", "tool", b"{}", key, "failed", one, 9, b"5", 9, False
        )
        for one in attempts
    ]
    return Restore(thread_id, [b'{"r":1}'], [(b'"x"', b"1")], calls, 8, 9)


# What happened before


class Start(NamedTuple):
    """Operations one after the other, and then what a crash has left."""

    before: Sequence[Write]
    left: Callable[[Path], object] = lambda home: None


def _write(home: Path, content: bytes, ending: str = "") -> None:
    with open(f"{home}/threads/{log_name('t')}{ending}", "ab") as file:
        file.write(content)


def _register(home: Path, content: bytes) -> None:
    with open(home / "used-keys" / register_name("k"), "ab") as file:
        file.write(content)


def _claim(home: Path, *places: tuple[str, str, int]) -> None:
    """Leave lines of the key that lead to no call."""
    path = home / "used-keys" / register_name("k")
    folder = Folder(str(home))

    with writing.Locked(folder, str(path)) as register:
        left: list[Line] = []

        for thread_id, call_id, attempt in places:
            call = restore(thread_id, attempt).calls[0]._replace(call_id=call_id)
            left.append(claimed(call))

        register.append(left)


def _begin(home: Path) -> None:
    """Leave the first line of a log, whose first operation was lost."""
    _write(home, sealed(b"", [header("t", 1795232045123456)]))


# Of what was written together, a power loss took a part.
_HOLE = b'{"add":{"n":2},"at":[2,17957' + bytes(40) + b',"0000"]}\n'

STARTS = {
    "nothing": Start([]),
    "a message": Start([append("t")]),
    "a claim": Start([claim("t", "c")]),
    "a failure": Start([append("t"), claim("t", "c"), resolve("t", "c")]),
    "a completion": Start([claim("t", "c"), resolve("t", "c", "completed")]),
    "a deletion": Start([append("t"), claim("t", "c"), Erase("t", False)]),
    "a trim": Start(
        [append("t"), append("t"), claim("t", "c"), resolve("t", "c"), Trim("t", 1)]
    ),
    "a deletion of a failure": Start(
        [claim("t", "c"), resolve("t", "c"), Erase("t", False)]
    ),
    "two failures": Start(
        [claim("t", "c"), resolve("t", "c"), claim("u", "c"), resolve("u", "c")]
    ),
    "a failure before a claim": Start(
        [claim("u", "c"), resolve("u", "c"), claim("t", "c")]
    ),
    "a claim of another thread": Start([append("t"), claim("u", "c")]),
    "an empty log": Start([], lambda home: _write(home, b"")),
    "a torn first write": Start([], lambda home: _write(home, b'{"thread":"t","crea')),
    "a log without an operation": Start([], _begin),
    "a torn write": Start(
        [append("t")], lambda home: _write(home, b'{"add":{"n":2},"at":[2,')
    ),
    "a write with a hole": Start([append("t")], lambda home: _write(home, _HOLE)),
    "a draft": Start([], lambda home: _write(home, b'{"thread":', ".tmp")),
    "a draft of a deletion": Start(
        [append("t")], lambda home: _write(home, b'{"thread":', ".tmp")
    ),
    "set aside": Start([], lambda home: _write(home, b'{"add":', ".torn")),
    "a void claim": Start([], lambda home: _claim(home, ("t", "c", 1))),
    "claims of a forgotten thread": Start(
        [], lambda home: _claim(home, ("u", "d", 1), ("u", "r4", 4), ("t", "r3", 3))
    ),
    "void claims behind a failure": Start(
        [claim("u", "c"), resolve("u", "c")],
        lambda home: _claim(home, ("t", "c", 2), ("t", "r3", 3)),
    ),
    "a torn claim": Start(
        [claim("u", "c"), resolve("u", "c")],
        lambda home: _register(home, b'{"key":"k","attempt":2,"thr'),
    ),
}

# What overlaps

OPERATIONS: dict[str, Operation] = {
    "append": Append("t", [b'{"n":1}'], None),
    "claim": claim("t", "c"),
    "claim elsewhere": claim("u", "d"),
    "claim another key": claim("t", "c", "other"),
    "fail": resolve("t", "c"),
    "delete": Erase("t", False),
    "forget": Erase("t", True),
    "forget elsewhere": Erase("u", True),
    "trim": Trim("t", 2),
    "restore": restore("t", 3),
    "restore two": restore("t", 1, 5),
    "restore elsewhere": restore("u", 4),
    "delete unless changed": Erase("t", False, 1),
    "load": Read("load", "t"),
    "tail": Read("tail", "t"),
    "list": Read("list"),
    "find": Read("find", "k"),
}

AFTERWARDS: list[Operation] = [
    Read("list"),
    *(Read("dump", one) for one in ("t", "u")),
    *(Read("find", key) for key in ("k", "other")),
    # The store goes on: a key that is free can be claimed, once.
    claim("v", "c"),
    claim("w", "c"),
    Append("t", [b"{}"], None),
    Trim("t", 1),
    Read("tail", "t"),
    Erase("v", True),
    Erase("u", True),
    Read("find", "k"),
    restore("u", 7),
    claim("w", "c"),
    Erase("t", True),
    restore("t", 5),
    Read("find", "k"),
    claim("v", "c", "other"),
    Read("dump", "t"),
]


def on_files(folder: Folder, operation: Operation) -> Any:
    match operation:
        case Read("load", thread_id):
            return store._snapshot(folder, thread_id, 0, None, decode)
        case Read("tail", thread_id):
            return store._snapshot(folder, thread_id, -1, None, decode)
        case Read("dump", thread_id):
            return store._dump(folder, thread_id)
        case Read("find", key):
            return keys.newest_attempt(folder, key)
        case Read():
            return store._threads(folder, "", None, 9, True)
        case _:
            [outcome] = writing.commit(folder, [operation])
            return outcome


async def in_memory(model: MemoryStore, operation: Operation) -> Any:
    match operation:
        case Read("load", thread_id):
            return await model.snapshot(thread_id, 0, None, decode)
        case Read("tail", thread_id):
            return await model.snapshot(thread_id, -1, None, decode)
        case Read("dump", thread_id):
            return await model.dump(thread_id)
        case Read("find", key):
            return await model.holder(key)
        case Read():
            return await model.threads("", None, 9, True)

    [outcome] = await model.commit([operation])
    return outcome


def decode(rows: Iterable[bytes | str], _first: int) -> list[Any]:
    return list(rows)


def plain(outcome: Any) -> Any:
    """Return an outcome that can be compared, without times."""
    if isinstance(outcome, BaseException):
        return repr(outcome)

    if isinstance(outcome, list):  # of threads
        return [(one.thread_id, one.version) for one in outcome]

    return without_times(outcome)


class Seen(NamedTuple):
    """What operations answered, by their names, and what is seen afterwards."""

    answers: dict[str, Any]
    afterwards: list[Any]


def expected(start: Start, names: Iterable[Sequence[str]]) -> list[Seen]:
    """Return what the store in memory answers, for each of these orders."""

    async def run() -> list[Seen]:
        found = []

        for order in names:
            model = MemoryStore()

            for one in start.before:
                await in_memory(model, one)

            answers = [(n, plain(await in_memory(model, OPERATIONS[n]))) for n in order]
            after = [plain(await in_memory(model, one)) for one in AFTERWARDS]
            found.append(Seen(dict(answers), after))

        return found

    return asyncio.run(run())


def difference(steps: Sequence[str], found: Seen, orders: Sequence[Seen]) -> str:
    lines = [*steps, f"answered: {found.answers}"]

    for number, one in enumerate(orders):
        if found.answers != one.answers:
            lines.append(f"order {number} answers {one.answers}")

        pairs = zip(AFTERWARDS, found.afterwards, one.afterwards, strict=True)
        lines += [
            f"order {number}, then {operation}: {here}, not {there}"
            for operation, here, there in pairs
            if here != there
        ]

    return "\n".join(lines)


def _content(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


class Home:
    """A store's folder in the state of a `Start`, which can be made again."""

    def __init__(self, path: Path, start: Start) -> None:
        self._path = path
        schema.prepare(str(path), str(path))
        self._folders = [f"{path}/threads", f"{path}/used-keys"]
        # The registers of other keys stay empty.
        used = {f"{path}/used-keys/{register_name(one)}" for one in ("k", "other")}
        self._unused = self._names() - used

        for one in start.before:
            on_files(self.folder(), one)

        start.left(path)
        self._files = self._read()
        self._seen: dict[frozenset[tuple[str, bytes]], list[Any]] = {}

    def folder(self) -> Folder:
        """Return the store as another process sees it, which has read nothing yet."""
        return Folder(str(self._path))

    def make(self) -> None:
        files = self._read()

        for name in files.keys() - self._files.keys():
            os.unlink(name)

        for name, content in self._files.items():
            if files.get(name) != content:
                Path(name).write_bytes(content)

    def afterwards(self) -> list[Any]:
        """Return what another process sees, which is the same for equal files."""
        files = frozenset(self._read().items())

        if files not in self._seen:
            folder = self.folder()
            self._seen[files] = [plain(on_files(folder, one)) for one in AFTERWARDS]

        return self._seen[files]

    def _names(self) -> set[str]:
        return {f"{one}/{name}" for one in self._folders for name in os.listdir(one)}

    def _read(self) -> dict[str, bytes]:
        """Return the content of each file that an operation may change."""
        return {name: _content(name) for name in self._names() - self._unused}


def check_orders(
    home: Home, start: Start, names: Sequence[str], *, one_process: bool = False
) -> int:
    """Run the operations in every order; return how many orders there were."""
    orders = expected(start, itertools.permutations(names))
    count = 0

    def begin() -> list[Callable[[], Any]]:
        home.make()
        shared = home.folder()
        return [
            partial(on_files, shared if one_process else home.folder(), OPERATIONS[one])
            for one in names
        ]

    for outcomes, steps in explore(begin):
        answers = dict(zip(names, map(plain, outcomes), strict=True))
        found = Seen(answers, home.afterwards())
        count += 1

        if found not in orders:
            raise AssertionError(difference(steps, found, orders))

    return count


# The tests


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """The store's folder, in which operations stop before system calls."""
    with patched():
        yield tmp_path


QUICK = [
    ("nothing", "append", "delete"),
    ("nothing", "delete", "restore"),
    ("a message", "append", "load"),
    ("a failure", "claim elsewhere", "forget"),
    ("a failure", "find", "restore two"),
    ("nothing", "find", "restore two"),
    ("a deletion", "append", "fail"),
    ("a torn write", "append", "load"),
    ("a trim", "append", "trim"),
    ("a trim", "trim", "load"),
    ("a write with a hole", "claim", "tail"),
    ("claims of a forgotten thread", "restore", "restore elsewhere"),
]


@pytest.mark.parametrize(("name", "one", "other"), QUICK)
def test_two_operations_overlap(place: Path, name: str, one: str, other: str) -> None:
    """Their outcome is that of one after the other, whatever the order of their calls.

    The orders of the other pairs take longer; `make test-long` runs them.
    """
    home = Home(place, STARTS[name])
    assert check_orders(home, STARTS[name], (one, other)) > 1


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", STARTS)
def test_any_two_operations_overlap(place: Path, name: str) -> None:
    """In two processes, or in two threads of one process that share what they read.

    A sixth of the pairs from each start, the others from the next five.
    """
    home = Home(place, STARTS[name])
    pairs = [*itertools.combinations(OPERATIONS, 2)][[*STARTS].index(name) % 6 :: 6]

    for number, names in enumerate(pairs):
        check_orders(home, STARTS[name], names, one_process=number % 2 == 1)


THREE = [
    ("a failure", "claim elsewhere", "forget", "find"),
    ("a failure", "claim", "claim elsewhere", "claim another key"),
]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "one", "two", "three"), THREE)
def test_three_operations_overlap(
    place: Path, name: str, one: str, two: str, three: str
) -> None:
    """Pairs do not show what needs a third process."""
    home = Home(place, STARTS[name])
    assert check_orders(home, STARTS[name], (one, two, three)) > 1


def test_a_new_file_has_the_number_of_a_removed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that waited for the lock of a removed log does not write there."""
    home = Home(tmp_path, STARTS["an empty log"])
    folder = home.folder()
    log, other = tmp_path / "threads" / log_name("t"), tmp_path / "other"
    os.link(log, other)
    on_files(folder, Erase("t", False))  # it has seen the number, and removed the name
    lock = schema.lock

    def late_lock(fd: int, path: str) -> None:
        lock(fd, path)

        if other.exists():
            other.rename(log)

    monkeypatch.setattr(schema, "lock", late_lock)
    on_files(folder, append("t"))
    assert on_files(home.folder(), Read("load", "t")).version == 1


def check_kills(home: Home, start: Start, names: Sequence[str]) -> None:
    """Kill the operations, one after the other, in each combination of their steps."""
    choices = [*itertools.product((False, True), repeat=len(names))]
    done = [[*itertools.compress(names, choice)] for choice in choices]
    orders = dict(zip(choices, expected(start, done), strict=True))
    steps = [0] * len(names)

    while True:
        home.make()
        works = [partial(on_files, home.folder(), OPERATIONS[one]) for one in names]
        outcomes = [*map(kill_before, works, steps)]
        ended = [not isinstance(outcome, Killed) for outcome in outcomes]
        found = home.afterwards()
        # One that was killed has run wholly or not at all.
        assert any(
            found == its.afterwards
            for choice, its in orders.items()
            if all(map(operator.ge, choice, ended))
        ), f"{names} killed before steps {steps}"

        if all(ended):
            return

        last = max(number for number, end in enumerate(ended) if not end)
        steps = [*steps[:last], steps[last] + 1, *[0] * (len(steps) - last - 1)]


@pytest.mark.parametrize("name", sweep(STARTS, ["nothing"]))
def test_a_kill_at_any_step(place: Path, name: str) -> None:
    """The operation is applied or not, and the store goes on."""
    home = Home(place, STARTS[name])

    for one, operation in OPERATIONS.items():
        if not isinstance(operation, Read):
            check_kills(home, STARTS[name], [one])


def test_a_trim_is_killed_at_any_step(place: Path) -> None:
    """All older messages are gone, or none; nothing newer is."""
    check_kills(Home(place, STARTS["a trim"]), STARTS["a trim"], ["trim"])


def check_failures(home: Home, start: Start, name: str) -> None:
    """Refuse each step of an operation."""
    without, applied = expected(start, [[], [name]])

    for steps in itertools.count():
        home.make()
        work = partial(on_files, home.folder(), OPERATIONS[name])
        outcome, step = fail_at(work, steps)
        found = home.afterwards()

        if isinstance(outcome, OSError):
            allowed = [without]
        elif isinstance(outcome, StoreFailure):
            allowed = [without, applied] if outcome.fate == "unknown" else [without]
        else:
            assert plain(outcome) == applied.answers[name], f"{name}: {step} failed"
            allowed = [applied]

        assert found in [its.afterwards for its in allowed], f"{name}: {step} failed"

        if not step:
            return


@pytest.mark.long
@pytest.mark.parametrize("name", STARTS)
def test_a_failure_of_any_step(place: Path, name: str) -> None:
    """What was refused was not applied, and no answer is wrong."""
    home = Home(place, STARTS[name])

    for one in OPERATIONS:
        check_failures(home, STARTS[name], one)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        *(
            ("two failures", *pair)
            for pair in itertools.permutations(
                ("claim elsewhere", "forget", "restore two"), 2
            )
        ),
        ("void claims behind a failure", "claim elsewhere", "restore two"),
    ],
)
def test_two_kills_at_any_steps(place: Path, name: str, one: str, other: str) -> None:
    """The second operation finds what the first one left."""
    check_kills(Home(place, STARTS[name]), STARTS[name], (one, other))
