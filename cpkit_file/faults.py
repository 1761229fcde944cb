"""What the operating system's errors mean in the contract's words."""

from __future__ import annotations

import copy

from cpkit.errors import BackendUnavailable, CheckpointerError

__all__ = ["copy_of", "unavailable"]


def unavailable(
    store: str, exc: OSError, *, maybe_applied: bool = False
) -> BackendUnavailable:
    """Return the error of the contract, with the system's as its cause.

    ``maybe_applied`` says whether the operation may have happened by then.
    """
    error = BackendUnavailable(store, str(exc), maybe_applied=maybe_applied)
    error.__cause__ = exc
    return error


def copy_of(error: CheckpointerError) -> CheckpointerError:
    """Return the error for one of several callers.

    Each has its own, because an error gathers the traceback of where it goes.
    """
    other = copy.copy(error)
    other.__cause__ = error.__cause__
    return other
