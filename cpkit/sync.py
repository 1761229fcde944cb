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
    ``KeyboardInterrupt`` at any moment of a call cancels the operation, which then
    takes effect wholly or not at all. Leaving the block always ends the thread.

Signals
    A signal handler can call, also if it interrupts a call of the same object.

Forks
    The thread does not exist in a child of ``os.fork``: there, every call raises
    ``RuntimeError``, and closing does nothing. Open a store in each process.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Generic, Self, TypeVar, cast, overload

from cpkit.errors import Closed
from cpkit.protocol import Checkpointer
from cpkit.records import CallRecord, CheckpointData, JsonValue, ToolCall
from cpkit.registry import open_checkpointer

__all__ = ["LoopCall", "SyncCheckpointer", "running_loop"]

MessageT = TypeVar("MessageT")
T = TypeVar("T")

Opener = Callable[[], AbstractAsyncContextManager[Checkpointer[MessageT]]]

# Seconds after which a waiting call looks whether the loop has ended without it.
_PAUSE = 1.0

# Seconds that a thread may take to begin.
_START = 1.0

# Methods of the optional protocols. The facade has those that the store has.
OPTIONAL = {
    "delete_thread",
    "dump_thread",
    "find_call",
    "list_calls",
    "list_threads",
    "load_range",
    "read",
    "restore_thread",
}


class LoopCall(Generic[T]):
    """A coroutine that runs on another thread's event loop, for a thread that waits.

    Ctrl-C can interrupt the waiting thread at any moment, also while it has the lock of
    a ``concurrent.futures.Future``. The loop would then wait for this lock for ever. So
    the two threads share no lock of Python code: the loop releases a lock of C, and
    gets its orders by ``call_soon_threadsafe``, which takes none.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, T],
        tasks: set[asyncio.Task[Any]] | None = None,
    ) -> None:
        """Make a call that is not started; while it runs, its task is in ``tasks``."""
        self._loop = loop
        self._work = work
        self._tasks = tasks
        self._task: asyncio.Task[T] | None = None
        self._value: T | None = None
        self._error: BaseException | None = None
        self._is_handed_over = False
        self._running = threading.Lock()
        self._running.acquire()

    def start(self) -> None:
        """Hand the coroutine over to the loop; ``RuntimeError`` if it is closed."""
        self._is_handed_over = True
        self._loop.call_soon_threadsafe(self._begin)

    def wait(self, timeout: float = -1) -> bool:
        """Wait until the coroutine has ended; return whether it has."""
        return self._running.acquire(timeout=timeout)

    def result(self) -> T:
        """Return the result of the coroutine, which has ended, or raise its error."""
        try:
            if self._error is not None:
                raise self._error

            return cast("T", self._value)
        finally:
            # The traceback of the error has this frame.
            del self

    def cancel(self) -> None:
        """Cancel the coroutine, unless it has ended."""
        if self._is_handed_over:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._cancel)
                return

        self._work.close()

    # On the loop

    def _begin(self) -> None:
        task = self._task = self._loop.create_task(self._work)

        if self._tasks is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._error = CancelledError()
        elif (error := task.exception()) is not None:
            self._error = error
        else:
            self._value = task.result()

        self._task = None
        self._running.release()

    def _cancel(self) -> None:
        if self._task is None:
            self._work.close()
        else:
            self._task.cancel()


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

        # Reentrant, because a signal handler may call while its thread has the lock.
        # The loop never takes it, so the handler's call can end meanwhile.
        self._lock = threading.RLock()
        self._pid: int | None = None
        self._is_open = False
        # The calls that `close` waits for. The tasks are changed on the loop only.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._submitted: set[Future[Any]] = set()
        self._stop = asyncio.Event()
        # Locks of C in place of events: see `LoopCall`.
        self._opening = threading.Lock()
        self._serving = threading.Lock()
        self._failure: BaseException | None = None

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
        self._opening.acquire()
        self._serving.acquire()
        # A daemon thread, so that a program ends even if it never closes the store.
        self._thread = threading.Thread(
            target=self._serve, name="cpkit-sync", daemon=True
        )

        try:
            self._thread.start()

            with self._opening:
                pass

            if self._failure is not None:
                raise self._failure
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

        try:
            with self._lock:
                was_open, self._is_open = self._is_open, False

            self._end()
        except BaseException:
            # This thread was interrupted: do not wait for calls in flight any longer.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel_calls)

            self._end()
            raise

        if was_open and self._failure is not None:
            raise self._failure

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
        call = LoopCall(self._loop, take())

        try:
            thread_id = self._finish(call)
        except CancelledError:
            raise Closed("this SyncCheckpointer") from None
        finally:
            call.cancel()
            del call

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
        return self.wait_for(work(self._inner))

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the store's loop, and wait for it, from any other thread.

        Unlike `run` it blocks an event loop that runs in this thread. Raises
        ``Closed``.
        """
        try:
            self._check()
            call = LoopCall(self._loop, work, self._tasks)
        except BaseException:
            work.close()
            raise

        try:
            return self._finish(call)
        except BaseException:
            # An operation that has ended stays as it is. If this thread was
            # interrupted, for instance by Ctrl-C, the operation is still running.
            call.cancel()
            raise
        finally:
            del call

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the store's loop, from any thread, without waiting.

        `close` waits for it. Raises ``Closed``. To wait at once, use `run`: Ctrl-C in a
        method of a ``Future`` can leave its lock locked, which stops the loop.
        """

        def start() -> Future[T]:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._submitted.add(future)
            return future

        try:
            future = self._start(start)
        except BaseException:
            work.close()
            raise

        future.add_done_callback(self._submitted.discard)
        return future

    def _start(self, start: Callable[[], T]) -> T:
        """Call a function that hands work over to the loop, unless `close` began."""
        self._check()

        with self._lock:
            if not self._is_open:
                raise Closed("this SyncCheckpointer")

            try:
                return start()
            except RuntimeError:
                # A signal handler closed the store just now.
                if self._loop.is_closed():
                    raise Closed("this SyncCheckpointer") from None

                raise

    def _finish(self, call: LoopCall[T]) -> T:
        """Start a call, unless `close` began, wait for it, and return its result."""
        try:
            self._start(call.start)

            while not call.wait(_PAUSE):
                if self._loop.is_closed() and not call.wait(0):
                    raise Closed("this SyncCheckpointer")

            return call.result()
        finally:
            del call

    def _check(self) -> None:
        if self._pid not in (None, os.getpid()):
            raise RuntimeError(
                "this SyncCheckpointer was opened before os.fork(), and its thread "
                "exists only in the parent: open one in each process"
            )

        if not self._is_open:
            raise Closed("this SyncCheckpointer")

    # The thread

    def _serve(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._hold_open())
        except BaseException as exc:
            self._failure = exc

        if "_inner" not in self.__dict__:
            self._opening.release()

        self._serving.release()

    async def _hold_open(self) -> None:
        async with self._opener() as cp:
            self._inner = cp
            self._opening.release()
            await self._stop.wait()

            while calls := self._calls():
                await asyncio.wait(calls)

    def _calls(self) -> set[asyncio.Future[Any]]:
        return {*self._tasks, *map(asyncio.wrap_future, tuple(self._submitted))}

    def _cancel_calls(self) -> None:
        for call in self._calls():
            call.cancel()

    def _end(self) -> None:
        """Let the thread end after the calls in flight, and wait for it."""
        if not self._has_started():
            self._loop.close()
            return

        # If opening failed, the loop has already ended.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)

        with self._serving:
            pass

        self._thread.join()

    def _has_started(self) -> bool:
        """Return whether the thread runs, or has run.

        An interrupt of ``Thread.start`` can come before the thread's first step. If the
        thread begins even later, it finds its loop closed, and ends.
        """
        tries = 100

        while self._thread.ident is None and tries:
            time.sleep(_START / 100)
            tries -= 1

        return self._thread.ident is not None


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
