"""Decoding of fetched messages: small loads in place, large ones in a worker thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest

from cpkit.driver import decode_rows


@pytest.mark.parametrize(
    ("count", "size", "worker"),
    [(0, 0, False), (512, 10, False), (513, 10, True), (2, 300_000, True)],
)
async def test_many_messages_are_decoded_in_a_worker_thread(
    count: int, size: int, worker: bool
) -> None:
    """Many rows or many bytes; the order and the first position stay the same."""
    bodies = [str(i).zfill(size) for i in range(count)]
    expected = list(bodies)
    threads = []

    def decode(rows: Iterable[bytes | str], first: int) -> list[Any]:
        threads.append(threading.current_thread())
        assert first == 7
        return list(rows)

    assert await decode_rows(decode, bodies, 7) == expected
    assert [thread is not threading.main_thread() for thread in threads] == [worker]


async def test_a_large_load_holds_no_message_twice() -> None:
    """The fetched texts are released while they are decoded."""
    bodies = [str(i) for i in range(1000)]
    left: list[int] = []

    def decode(rows: Iterable[bytes | str], first: int) -> list[Any]:
        left.extend(len(bodies) for _ in rows)
        return []

    await decode_rows(decode, bodies, 0)
    assert left == list(range(999, -1, -1))
