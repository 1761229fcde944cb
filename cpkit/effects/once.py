"""`once`: makes a plain function safe to call again, in two lines (docs/effects.md)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial, wraps
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

from cpkit.effects.effect import check_no_generator
from cpkit.effects.ledger import EffectLedger
from cpkit.effects.tools import call_function
from cpkit.protocol import Checkpointer
from cpkit.sync import SyncCheckpointer

__all__ = ["ONCE_THREADS", "once"]

ONCE_THREADS = "cpkit:once:"
"""How the ids of the threads start that have the records of plain functions."""

_NAMING = {"key_fields", "idempotency_key", "tool_call_id"}


def once(
    cp: Checkpointer[Any]
    | AbstractAsyncContextManager[Checkpointer[Any]]
    | SyncCheckpointer[Any]
    | Callable[[], Any],
    *,
    key: Callable[..., str],
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a function once for each key; later calls return the recorded result.

    ``cp`` is a checkpointer, or a function that returns the one that is open. ``key``
    gets the arguments of each call, and returns the text that names what is done: the
    same function and key is the same effect in the whole store. Every caller gets the
    result as JSON. ``options`` are those of `EffectLedger` that do not name the effect.

    The decorated function is async, and a sync function runs in a worker thread. With a
    `SyncCheckpointer` it is sync, and runs in another thread. It raises what
    `EffectLedger.run` raises: an exception of the function is final, except `NoEffect`.
    """
    if naming := _NAMING & options.keys():
        raise TypeError(f"{', '.join(sorted(naming))}: once names its effects by key=")

    ledgers: WeakKeyDictionary[Any, EffectLedger] = WeakKeyDictionary()

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        check_no_generator("once", function)
        signature = inspect.signature(function)

        async def call(handle: Any, *args: Any, **named: Any) -> Any:
            ledger = ledgers.get(handle)

            if ledger is None:
                ledger = ledgers[handle] = EffectLedger(handle, **options)

            signature.bind(*args, **named)
            name = key(*args, **named)

            if not isinstance(name, str) or not name:
                raise TypeError(f"key= must return a text, not {name!r:.80}")

            # One of 256 threads, so that none of them is long.
            place = f"{ONCE_THREADS}{sha256(name.encode()).hexdigest()[:2]}"
            work = partial(function, *args, **named)
            return await ledger.run(
                place, function.__name__, {"key": name}, lambda _: call_function(work)
            )

        @wraps(function)
        def wrapper(*args: Any, **named: Any) -> Any:
            handle = cp if not callable(cp) else cp()

            if isinstance(handle, SyncCheckpointer):
                return handle.run(lambda inner: call(inner, *args, **named))

            return call(handle, *args, **named)

        return wrapper

    return decorate
