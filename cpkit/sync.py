"""A store for code without an event loop: the same methods, called without ``await``.

The store runs on an event loop in its own thread, until the ``with`` block ends. Any
number of threads can share one object. Ctrl-C in a call cancels the operation; if it
comes while Python holds the lock of a future, the loop hangs: end the program then.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

from cpkit.errors import Closed
from cpkit.protocol import Checkpointer
from cpkit.records import CallRecord, CheckpointData, JsonValue, ToolCall
from cpkit.registry import open_checkpointer

if TYPE_CHECKING:
    import typing_extensions as t

__all__ = ["SyncCheckpointer", "running_loop"]

MessageT = TypeVar("MessageT")
FormT = TypeVar("FormT")
T = TypeVar("T")

Opener = Callable[[], AbstractAsyncContextManager[Checkpointer[MessageT]]]
Work = Callable[[Checkpointer[MessageT]], Coroutine[Any, Any, T]]

_OPTIONAL = """read load_range list_threads list_calls find_call delete_thread
    trim erase_calls dump_thread restore_thread search_threads durability""".split()


class SyncCheckpointer(Generic[MessageT]):
    """A checkpointer's methods for threads without an event loop.

    ``store`` and ``options`` are the arguments of `open_checkpointer`, or ``store`` is
    a function that returns an async context manager, called on the store's own loop.
    Inside a running event loop, and in a child of ``os.fork``, a call raises
    ``RuntimeError``; before and after the block, ``Closed``. The methods of the
    optional protocols, but for ``watch``, exist if the store has them.
    """

    @overload
    def __init__(self, store: Opener[MessageT]) -> None: ...
    @overload
    def __init__(
        self, store: str | None = None, *, message_type: type[MessageT], **options: Any
    ) -> None: ...
    @overload
    def __init__(
        self: SyncCheckpointer[FormT],
        store: str | None = None,
        *,
        message_type: t.TypeForm[FormT],
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
        self: SyncCheckpointer[dict[str, Any]], store: str | None = None, **options: Any
    ) -> None: ...
    def __init__(self, store: Any = None, **options: Any) -> None:
        if callable(store) and options:
            raise TypeError("options belong to a URL; the function passes them itself")

        opened: Any = None if callable(store) else open_checkpointer(store, **options)
        self._opener: Opener[MessageT] = store if opened is None else lambda: opened
        self._pid: int | None = None
        self._lock = threading.Lock()  # of these two
        self._is_open = False
        self._calls: set[Future[Any]] = set()

    def __enter__(self) -> Self:
        _refuse_inside_a_loop()

        if self._pid is not None:
            raise Closed("this SyncCheckpointer")

        self._pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._opened: Future[None] = Future()
        self._failure: BaseException | None = None
        # A daemon thread, so that a program ends even if it never closes the store.
        self._thread = threading.Thread(None, self._serve, "cpkit-sync", daemon=True)
        self._thread.start()

        try:
            self._opened.result()
        except BaseException:
            self._end()
            raise

        self._is_open = True
        return self

    def close(self, *exc_info: object) -> None:
        """Wait for calls in flight, close the store, end the thread; idempotent."""
        if self._pid != os.getpid():
            return

        _refuse_inside_a_loop()

        try:
            with self._lock:
                was_open, self._is_open = self._is_open, False

            wait(self._calls)
        finally:
            for call in [*self._calls]:  # after Ctrl-C in `wait`
                call.cancel()

            self._end()

        if was_open and self._failure is not None:
            raise self._failure

    __exit__ = close

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
        options: Any = {"expected_version": expected_version, "extra": extra}
        return self.run(lambda cp: cp.append(thread_id, messages, **options))

    def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        self.run(lambda cp: cp.save_extra(thread_id, extra))

    def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        return self.run(lambda cp: cp.record_issued(thread_id, call))

    def record_result(
        self, thread_id: str, call_id: str, result: JsonValue, *, success: bool = True
    ) -> CallRecord:
        args = thread_id, call_id, result
        return self.run(lambda cp: cp.record_result(*args, success=success))

    def find_completed(self, idempotency_key: str) -> CallRecord | None:
        return self.run(lambda cp: cp.find_completed(idempotency_key))

    def __getattr__(self, name: str) -> Any:
        """Return an optional method, or the durability, if the store has it."""
        found = getattr(self.__dict__.get("_inner"), name, None)

        if found is None or name not in _OPTIONAL:
            raise AttributeError(f"this store has no {name!r}", name=name, obj=self)

        if name == "durability":
            return found

        return lambda *args, **options: self.run(lambda _: found(*args, **options))

    @property
    def checkpointer(self) -> Checkpointer[MessageT]:
        """The async checkpointer, for use on ``loop`` only."""
        self._check()
        return self._inner

    def run(self, work: Work[MessageT, T]) -> T:
        """Call ``work`` with the async checkpointer on its loop, and wait for it."""
        _refuse_inside_a_loop()
        future = self.submit(work(self.checkpointer))

        try:
            return future.result()
        finally:
            future.cancel()  # if this thread was interrupted, it is still running
            del future  # the traceback of an error has this frame

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the store's loop, from any thread; `close` waits."""
        with self._lock:
            try:
                self._check()
                future = asyncio.run_coroutine_threadsafe(work, self.loop)
            except BaseException:
                work.close()
                raise

            self._calls.add(future)

        future.add_done_callback(self._calls.discard)
        return future

    def _check(self) -> None:
        if self._pid not in (None, os.getpid()):
            raise RuntimeError("opened before os.fork(): open one in each process")

        if not self._is_open:
            raise Closed("this SyncCheckpointer")

    def _serve(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self._hold_open())
        except BaseException as exc:
            self._failure = exc

            if not self._opened.done():
                self._opened.set_exception(exc)

    async def _hold_open(self) -> None:
        async with self._opener() as self._inner:
            self._opened.set_result(None)
            await self._stop.wait()

    def _end(self) -> None:
        with suppress(RuntimeError):  # the loop has ended: opening failed
            self.loop.call_soon_threadsafe(self._stop.set)

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
            "a SyncCheckpointer would block the running event loop; use 'async with "
            "open_checkpointer(...) as cp:', or a thread: asyncio.to_thread(...), or "
            "under gevent gevent.get_hub().threadpool.apply(...)"
        )
