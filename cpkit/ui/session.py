"""A session: its tree, the state at an entry, two branches, and a fork."""

from __future__ import annotations

import secrets
import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cpkit.errors import CorruptThread, VersionConflict
from cpkit.sessions import NotASession, SessionLog, UnknownEntry
from cpkit.sessions.entries import Entry
from cpkit.sessions.pictures.describe import describe, kind_of
from cpkit.sessions.pictures.outline import every_run, outline
from cpkit.ui.site import Page, Site, wanted

__all__ = ["branches", "fork", "fork_form", "state", "tree"]


async def tree(site: Site, request: Request) -> Page:
    """Show the branches of a session; straight runs are folded unless ``all``."""
    log = await _open(site, request)
    everything = "all" in request.query_params
    entries = log.entries
    depths: dict[int, int] = {}
    lines = []

    for run, parent in every_run(outline(log, everything=everything)):
        depth = 0 if parent is None else depths[id(parent)] + (len(parent.forks) > 1)
        depths[id(run)] = depth

        for index, item in enumerate(run.items):
            entry = entries[item.order]
            lines.append(
                {
                    "entry_id": entry["id"],
                    "position": item.order + 1,
                    "text": item.text,
                    "kind": item.kind,
                    "label": item.label,
                    "is_active": item.is_active,
                    "is_leaf": item.is_leaf,
                    "starts_branch": index == 0 and parent is not None,
                    "depth": depth,
                }
            )

    return Page(
        "tree.html",
        {
            "thread_id": log.session_id,
            "name": log.name,
            "version": log.version,
            "leaf_id": log.leaf_id,
            "leaves": [
                {"entry_id": leaf, "text": describe(log.entry(leaf))}
                for leaf in log.leaves()
            ],
            "all": everything,
            "lines": lines,
        },
    )


async def state(site: Site, request: Request) -> Page:
    """Show the state of a session at one entry: plan, model, thinking level."""
    log = await _open(site, request)
    entry = _entry(log, wanted(request, "entry"))
    context = log.context(entry["id"])
    model = context.model
    return Page(
        "state.html",
        {
            "thread_id": log.session_id,
            "entry_id": entry["id"],
            "text": describe(entry),
            "label": log.labels.get(entry["id"]),
            "time": _time(entry),
            "model": None
            if model is None
            else {"provider": model.provider, "model_id": model.model_id},
            "thinking_level": context.thinking_level,
            "state": context.state,
            "messages": len(context.messages),
            "last_messages": context.messages[-6:],
            "compacted": context.compaction is not None,
            "missing_results": [
                {"call_id": one.call_id, "tool": one.tool_name}
                for one in context.missing_results
            ],
        },
    )


async def branches(site: Site, request: Request) -> Page:
    """Show where two branches part, and the entries of each from there on."""
    log = await _open(site, request)
    left = log.branch(_entry(log, wanted(request, "left"))["id"])
    right = log.branch(_entry(log, wanted(request, "right"))["id"])
    shared = 0

    for one, other in zip(left, right, strict=False):
        if one["id"] != other["id"]:
            break

        shared += 1

    return Page(
        "branches.html",
        {
            "thread_id": log.session_id,
            "shared": shared,
            "fork": _line(left[shared - 1]) if shared else None,
            "left": [_line(entry) for entry in left[shared:]],
            "right": [_line(entry) for entry in right[shared:]],
        },
    )


async def fork_form(site: Site, request: Request) -> Page:
    """Ask for the first message of a branch or thread that follows an entry."""
    log = await _open(site, request)
    entry = _entry(log, wanted(request, "entry"))
    return Page("fork.html", _fork_data(log, entry) | {"made": None})


async def fork(site: Site, request: Request) -> Page:
    """Start a branch or a thread behind an entry, with its first message."""
    form: dict[str, str] = request.state.form
    log = await _open_log(site, form.get("id", ""))
    entry = _entry(log, form.get("entry", ""))
    text, into = form.get("text", "").strip(), form.get("into", "")

    if not text or into not in ("thread", "branch"):
        raise HTTPException(400, "the form is not complete; nothing was written")

    data = _fork_data(log, entry)
    now = time.time_ns() // 1_000_000
    message = {"role": "user", "content": text, "timestamp": now}

    try:
        if into == "thread":
            new_id = form.get("new_id", "")
            log = await log.fork(new_id, entry["id"], message=message)
        else:
            await log.append_message(message, after=entry["id"])
    except VersionConflict as exc:
        raise HTTPException(
            409, f"{exc}; look at the thread before you try again"
        ) from exc

    return Page("fork.html", data | {"made": log.session_id})


def _fork_data(log: SessionLog, entry: Entry) -> dict[str, Any]:
    return {
        "thread_id": log.session_id,
        "entry_id": entry["id"],
        "text": describe(entry),
        "new_id": f"{log.session_id[:100]}-{secrets.token_hex(3)}",
    }


async def _open(site: Site, request: Request) -> SessionLog:
    return await _open_log(site, wanted(request, "id"))


async def _open_log(site: Site, thread_id: str) -> SessionLog:
    try:
        log = await SessionLog.open(site.cp, thread_id)
    except (CorruptThread, NotASession) as exc:
        raise HTTPException(409, str(exc)) from exc

    if log.version == 0:
        raise HTTPException(404, f"there is no session {thread_id[:80]!r}")

    return log


def _entry(log: SessionLog, entry_id: str) -> Entry:
    try:
        return log.entry(entry_id)
    except UnknownEntry as exc:
        raise HTTPException(404, str(exc)) from exc


def _line(entry: Entry) -> dict[str, Any]:
    return {
        "entry_id": entry["id"],
        "kind": kind_of(entry),
        "text": describe(entry),
        "time": _time(entry),
    }


def _time(entry: Entry) -> str | None:
    found = entry.get("timestamp")
    return found if isinstance(found, str) else None
