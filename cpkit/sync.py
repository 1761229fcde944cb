"""A store for code without an event loop: the same methods, called without ``await``.

::

    with SyncCheckpointer("sqlite:///agent.db") as cp:
        cp.append("thread-1", [{"role": "user", "content": "hello"}])
        data = cp.load("thread-1")

The store runs on an event loop in its own thread, until the ``with`` block ends.

Threads
    Any number of threads can share one: their calls run concurrently on the loop.

Event loops
    A call inside a running event loop raises ``RuntimeError`` instead of blocking that
    loop. In async code, open the store with ``async with open_checkpointer(...)``.

Interrupts
    ``KeyboardInterrupt`` in a waiting call cancels the operation, which then takes
    effect wholly or not at all. Leaving the block always ends the thread.

Forks
    The thread does not exist in a child of ``os.fork``: there, every call raises
    ``RuntimeError``, and closing does nothing. Open a store in each process.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import CancelledError, Future, wait
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Generic, Self, TypeVar, overload

from cpkit.errors import Closed
from cpkit.protocol import Checkpointer
from cpkit.records import CallRecord, CheckpointData, JsonValue, ToolCall
from cpkit.registry import open_checkpointer

__all__ = ["SyncCheckpointer", "running_loop"]

MessageT = TypeVar("MessageT")
T = TypeVar("T")

Opener = Callable[[], AbstractAsyncContextManager[Checkpointer[MessageT]]]

# Methods of the optional protocols. The facade has those that the store has.
OPTIONAL = {
    "delete_thread",
    "dump_thread",
    "find_call",
    "list_calls",
    "list_threads",
    "read",
    "restore_thread",
}


class _Changes(Iterator[str]):
    """The ids of a watch. Unlike a generator, it goes on after it raised an error."""

    def __init__(self, next_change: Callable[[], str]) -> None:
        self._next_change = next_change

    def __next__(self) -> str:
        return self._next_change()


class SyncCheckpointer(Generic[MessageT]):
    """A checkpointer's methods for threads without an event loop.

    ``store`` and ``options`` are the arguments of `open_checkpointer`. ``store`` can
    also be a function without arguments that returns an async context manager of a
    checkpointer; it is called on the store's own loop. Enter the object once, and use
    it from any thread.

    The optional methods (``read``, ``list_threads``, ``list_calls``, ``find_call``,
    ``delete_thread``, ``dump_thread``, ``restore_thread``, ``watch``) and the property
    ``durability`` exist if the opened store has them. ``watch`` is a plain context
    manager of a plain iterator; `close` ends it with ``Closed``.

    The constructor raises ``InvalidURL``; entering raises the errors of opening. A call
    before entering or after closing raises ``Closed``.
    """

    @overload
    def __init__(self, store: Opener[MessageT]) -> None: ...
    @overload
    def __init__(
        self,
        store: str | None = None,
        *,
        message_type: type[MessageT],
        **options: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: SyncCheckpointer[Any],
        store: str | None = None,
        *,
        message_type: Any,
        **options: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: SyncCheckpointer[dict[str, JsonValue]],
        store: str | None = None,
        **options: Any,
    ) -> None: ...
    def __init__(
        self, store: str | Opener[MessageT] | None = None, **options: Any
    ) -> None:
        if callable(store):
            if options:
                raise TypeError(
                    "options belong to a URL; pass them to the store in the function"
                )

            self._opener = store
        else:
            opened: AbstractAsyncContextManager[Any] = open_checkpointer(
                store, **options
            )
            self._opener = lambda: opened

        self._lock = threading.Lock()
        self._pid: int | None = None
        self._is_open = False
        self._pending: set[Future[Any]] = set()
        self._stop = asyncio.Event()

    def __repr__(self) -> str:
        return (
            f"<SyncCheckpointer over {self._inner!r}>"
            if self._is_open
            else ("<SyncCheckpointer, not open>")
        )

    def __enter__(self) -> Self:
        _refuse_inside_a_loop()

        with self._lock:
            if self._pid is not None:
                raise Closed("this SyncCheckpointer")

            self._pid = os.getpid()

        self._loop = asyncio.new_event_loop()
        self._ended: Future[None] = Future()
        started: Future[Checkpointer[MessageT]] = Future()
        # A daemon thread, so that a program ends even if it never closes the store.
        self._thread = threading.Thread(
            target=self._serve, args=[started], name="cpkit-sync", daemon=True
        )

        try:
            self._thread.start()
            self._inner = started.result()
        except BaseException:
            self._end()
            raise

        self._is_open = True
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for calls in flight, close the store, end the thread; idempotent.

        Raises the errors of closing the store.
        """
        if self._pid != os.getpid():
            return

        _refuse_inside_a_loop()

        with self._lock:
            was_open, self._is_open = self._is_open, False
            pending = set(self._pending)

        try:
            wait(pending)
        finally:
            self._end()

        if was_open:
            self._ended.result()

    # The six methods

    def load(self, thread_id: str) -> CheckpointData[MessageT] | None:
        return self.run(lambda cp: cp.load(thread_id))

    def append(
        self,
        thread_id: str,
        messages: Sequence[MessageT],
        *,
        expected_version: int | None = None,
        extra: Mapping[str, JsonValue] | None = None,
    ) -> int:
        return self.run(
            lambda cp: cp.append(
                thread_id, messages, expected_version=expected_version, extra=extra
            )
        )

    def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        self.run(lambda cp: cp.save_extra(thread_id, extra))

    def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        return self.run(lambda cp: cp.record_issued(thread_id, call))

    def record_result(
        self,
        thread_id: str,
        call_id: str,
        result: JsonValue,
        *,
        success: bool = True,
    ) -> CallRecord:
        return self.run(
            lambda cp: cp.record_result(thread_id, call_id, result, success=success)
        )

    def find_completed(self, idempotency_key: str) -> CallRecord | None:
        return self.run(lambda cp: cp.find_completed(idempotency_key))

    def __getattr__(self, name: str) -> Any:
        """Return an optional method, or the durability, if the store has it."""
        inner = self.__dict__.get("_inner")

        if name == "durability" and inner is not None:
            return inner.durability

        if name == "watch" and hasattr(inner, name):
            return self._watch

        if name not in OPTIONAL or not hasattr(inner, name):
            raise AttributeError(f"{self!r} has no {name!r}", name=name, obj=self)

        def method(*args: Any, **kwargs: Any) -> Any:
            return self.run(lambda cp: getattr(cp, name)(*args, **kwargs))

        method.__name__ = name
        return method

    @contextmanager
    def _watch(self, *thread_ids: str) -> Iterator[Iterator[str]]:
        async def enter(cp: Any) -> tuple[Any, Any]:
            watch = cp.watch(*thread_ids)
            return watch, await watch.__aenter__()

        async def leave(cp: object) -> None:
            await watch.__aexit__(None, None, None)

        watch, changes = self.run(enter)

        try:
            yield _Changes(partial(self._next_change, changes))
        finally:
            with suppress(Closed):
                self.run(leave)

    def _next_change(self, changes: AsyncIterator[str]) -> str:
        async def take() -> str | None:
            return await anext(changes, None)

        _refuse_inside_a_loop()
        # `close` does not wait for a watch, but ends it.
        future = self._start(take(), pending=False)

        try:
            thread_id = future.result()
        except CancelledError:
            raise Closed("this SyncCheckpointer") from None
        finally:
            future.cancel()

        if thread_id is None:
            raise StopIteration

        return thread_id

    # For code that builds on the store, such as a framework's adapter

    @property
    def checkpointer(self) -> Checkpointer[MessageT]:
        """The async checkpointer; use it on `loop` only."""
        self._check()
        return self._inner

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the store runs on."""
        self._check()
        return self._loop

    def run(
        self, work: Callable[[Checkpointer[MessageT]], Coroutine[Any, Any, T]]
    ) -> T:
        """Call ``work`` with the async checkpointer on its loop, and wait for it.

        Raises ``RuntimeError`` inside a running event loop, and ``Closed``.
        """
        _refuse_inside_a_loop()
        self._check()
        future = self.submit(work(self._inner))

        try:
            return future.result()
        except BaseException:
            # An operation that has ended stays as it is. If this thread was
            # interrupted, for instance by Ctrl-C, the operation is still running.
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the store's loop, from any thread, without waiting.

        `close` waits for it. Raises ``Closed``.
        """
        future = self._start(work, pending=True)
        future.add_done_callback(self._forget)
        return future

    def _start(self, work: Coroutine[Any, Any, T], *, pending: bool) -> Future[T]:
        """Start a coroutine on the loop, unless `close` began; it waits if pending."""
        try:
            self._check()

            with self._lock:
                if not self._is_open:
                    raise Closed("this SyncCheckpointer")

                future = asyncio.run_coroutine_threadsafe(work, self._loop)

                if pending:
                    self._pending.add(future)
        except BaseException:
            work.close()
            raise

        return future

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._pending.discard(future)

    def _check(self) -> None:
        if self._pid not in (None, os.getpid()):
            raise RuntimeError(
                "this SyncCheckpointer was opened before os.fork(), and its thread "
                "exists only in the parent: open one in each process"
            )

        if not self._is_open:
            raise Closed("this SyncCheckpointer")

    # The thread

    def _serve(self, started: Future[Checkpointer[MessageT]]) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._hold_open(started))
        except BaseException as exc:
            if not started.done():
                started.set_exception(exc)

            self._ended.set_exception(exc)
        else:
            self._ended.set_result(None)

    async def _hold_open(self, started: Future[Checkpointer[MessageT]]) -> None:
        async with self._opener() as cp:
            started.set_result(cp)
            await self._stop.wait()

    def _end(self) -> None:
        if self._thread.ident is None:
            self._loop.close()
            return

        # If opening failed, the loop has already ended.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)

        self._thread.join()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or ``None``."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _refuse_inside_a_loop() -> None:
    if running_loop() is not None:
        raise RuntimeError(
            "a SyncCheckpointer would block the running event loop; use "
            "'async with open_checkpointer(...) as cp:' and await its methods, or call "
            "from another thread: await asyncio.to_thread(...)"
        )
