"""Sessions of Google's Agent Development Kit in any store.

::

    service = SessionService(cp)
    runner = Runner(app_name="app", agent=agent, session_service=service)

A session is one thread: the first message creates it, and each later message has one
event. The session's state is the thread's extra, one key for each key of the state. An
event and its change of the state are one append at a known version.

The state of an app, and that of a user, are the extra of a thread of their own: by key,
the number of the last change and the value. A change takes the next number of that
thread, is stored with its event as what the session *owes*, is applied, and is marked
as applied. It is applied only to keys without a higher number, so it may be applied
late and twice. If the process dies in between, or the store fails, the next call that
reads the session applies it, and so does the next event before it owes something else.
Each number and each change is a small message of the app's or the user's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import isfinite
from typing import Any, Literal
from urllib.parse import quote, unquote
from uuid import uuid4
from weakref import WeakValueDictionary

from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from cpkit.driver.backoff import backoff_pauses
from cpkit.driver.ids import check_id
from cpkit.errors import BackendUnavailable, CheckpointerError, VersionConflict
from cpkit.fenced import append_once, read_range
from cpkit.fitting import append_what_fits, log_missing, placeholder
from cpkit.integrations.bridge import Bridge, completed
from cpkit.protocol import Checkpointer, ErasesThreads, ListsThreads, ReadsRanges
from cpkit.records import CheckpointData, ThreadInfo
from cpkit.registry import needs_extra
from cpkit.sessions.context import copied
from cpkit.sync import SyncCheckpointer

with needs_extra("cpkit.integrations.google_adk", "google-adk"):
    from google.adk.errors import StaleSessionError
    from google.adk.errors.already_exists_error import AlreadyExistsError
    from google.adk.errors.session_not_found_error import SessionNotFoundError
    from google.adk.events import Event
    from google.adk.sessions import BaseSessionService, Session, State
    from google.adk.sessions.base_session_service import (
        GetSessionConfig,
        ListSessionsResponse,
    )
    from google.genai import types

__all__ = ["SessionService", "session_thread"]

logger = logging.getLogger(__name__)

_SESSIONS = "cpkit:google-adk:"
_APPS = "cpkit:google-adk-app:"
_USERS = "cpkit:google-adk-user:"

# Keys of an extra. A key of the state follows _STATE; the others are of sessions only.
_STATE = "state:"
_UPDATED = "updated"
_OWED = "owed"

# A read of the events after a time begins with so many of the newest.
_FIRST_READ = 32

_PAGE_SIZE = 100  # of a list

# The sessions whose states a service keeps for its next list.
_LISTED = 256

# How often to ask for a number if the store does not answer: one that got lost is not
# used.
_TRIES = 3

# How many stored events before those of a session are searched for an event that is
# delivered again: a session may be read with its newest events only.
_DUPLICATE_WINDOW = 16


class SessionService(BaseSessionService):  # type: ignore[misc]  # types are not followed
    """The ``session_service`` of the ADK's ``Runner``.

    ``cp`` is any store, opened without ``message_type=``, or a `SyncCheckpointer`. The
    methods may be called from any event loop.

    `append_event` stores an event and its change of the session's state in one atomic
    step. It raises ``StaleSessionError`` if the stored session has an event that the
    given session lacks, and writes nothing. An event that is delivered again is not
    stored twice if the session has it, or if it is among the 16 stored events before
    those of the session. The store compares the number of events only: if another
    process deleted the session and made one with its id and as many events, that one
    gets the event.

    `delete_session` needs a store that erases, and `list_sessions` one that lists its
    threads; otherwise they raise ``NotImplementedError``.
    """

    def __init__(self, cp: Checkpointer[Any] | SyncCheckpointer[Any]) -> None:
        self._bridge = Bridge(cp, wait_for_loop=True)
        self._cp = self._bridge.checkpointer
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # By thread, what this process could not apply to shared states.
        self._unpaid: dict[str, dict[str, Any]] = {}
        # What the last lists read. Each change of a session that a reader sees has a
        # version of its own.
        self._listed: dict[ThreadInfo, CheckpointData[Any]] = {}

    async def create_session(
        self,
        *,
        app_name: str,
        user_id: str,
        state: dict[str, Any] | None = None,
        session_id: str | None = None,
    ) -> Session:
        """Create a session; raises ``AlreadyExistsError`` if the id is in use."""
        own_id = (session_id or "").strip() or str(uuid4())
        await self._bridge.go(self._create(app_name, user_id, own_id, state or {}))
        session = await self.get_session(
            app_name=app_name, user_id=user_id, session_id=own_id
        )

        if session is None:
            raise SessionNotFoundError(f"session {own_id[:80]!r} was deleted meanwhile")

        return session

    async def get_session(
        self,
        *,
        app_name: str,
        user_id: str,
        session_id: str,
        config: GetSessionConfig | None = None,
    ) -> Session | None:
        """Return the session with its state, or ``None``."""
        own_id = session_id.strip()

        if not own_id:  # no session has an empty id
            return None

        return await self._bridge.go(self._get(app_name, user_id, own_id, config))

    async def list_sessions(
        self, *, app_name: str, user_id: str | None = None
    ) -> ListSessionsResponse:
        """Return the sessions without events, the one that changed last at the end."""
        return await self._bridge.go(self._list(app_name, user_id))

    async def delete_session(
        self, *, app_name: str, user_id: str, session_id: str
    ) -> None:
        """Erase the session; the states of its app and its user stay."""
        if own_id := session_id.strip():
            await self._bridge.go(self._delete(app_name, user_id, own_id))

    async def get_user_state(self, *, app_name: str, user_id: str) -> dict[str, Any]:
        """Return the state of the user in the app, without the prefix ``user:``."""
        thread_id = _thread(_USERS, app_name, user_id)
        return await self._bridge.go(self._shared_state(thread_id))

    async def append_event(self, session: Session, event: Event) -> Event:
        """Store the event and its change of the state, then apply both to the session.

        A cancelled call is completed before it raises, so that the session has what is
        stored. Raises ``StaleSessionError`` and ``SessionNotFoundError``.
        """
        if event.partial:
            return event

        # Twice: one completes the work on the store's loop, the other on this loop.
        work = completed(self._append_event(session, event))
        return await completed(self._bridge.go(work))

    # On the store's event loop

    async def _create(
        self, app_name: str, user_id: str, session_id: str, state: dict[str, Any]
    ) -> None:
        thread_id = session_thread(app_name, user_id, session_id)
        _thread(_USERS, app_name, user_id)  # raises if that thread's id is too long
        record = {"created": uuid4().hex}
        extra = {_UPDATED: time.time(), **_changes(state)}
        owed = await self._numbered(app_name, user_id, extra)

        try:
            await append_once(
                self._cp, thread_id, [record], expected_version=0, extra=extra
            )
        except VersionConflict:
            raise AlreadyExistsError(
                f"session with id {session_id[:80]} already exists"
            ) from None

        if owed:
            await self._apply_shared(app_name, user_id, thread_id, owed, 1)

    async def _get(
        self,
        app_name: str,
        user_id: str,
        session_id: str,
        config: GetSessionConfig | None,
    ) -> Session | None:
        thread_id = session_thread(app_name, user_id, session_id)
        data = await self._load_wanted(thread_id, config)

        if data is None or not data.version:
            return None

        await self._settle(app_name, user_id, thread_id, data)
        records = [record["event"] for record in data.messages if "event" in record]
        shared = _shared_threads(app_name, user_id).values()
        app, user = await asyncio.gather(*map(self._shared_state, shared))
        session = _session((app_name, user_id, session_id), data, app, user)
        session.events = [_event(thread_id, one) for one in _wanted(records, config)]
        return session

    async def _list(self, app_name: str, user_id: str | None) -> ListSessionsResponse:
        if not isinstance(self._cp, ListsThreads):
            raise NotImplementedError("the store cannot list threads")

        parts = (app_name,) if user_id is None else (app_name, user_id)
        prefix = _SESSIONS + "".join(f"{quote(part, safe='')}/" for part in parts)
        after = None
        found: list[tuple[tuple[str, str, str], CheckpointData[Any]]] = []

        while True:
            page = await self._cp.list_threads(
                prefix=prefix, after=after, limit=_PAGE_SIZE
            )

            for info, data in (await self._load_listed(page)).items():
                ids = info.thread_id.removeprefix(_SESSIONS).split("/")

                # Another program may have a thread of another form with this prefix.
                if data is not None and data.version and len(ids) == 3:
                    owner, session_id = map(unquote, ids[1:])
                    await self._settle(app_name, owner, info.thread_id, data)
                    found.append(((app_name, owner, session_id), data))

            if len(page) < _PAGE_SIZE:  # the last one
                break

            after = page[-1].thread_id

        owners = [*{owner for (_, owner, _), _ in found}]
        shared = [_thread(_USERS, app_name, owner) for owner in owners]
        shared += [_thread(_APPS, app_name)] if found else []
        *states, app = await asyncio.gather(*map(self._shared_state, shared)) or [{}]
        users = dict(zip(owners, states, strict=True))
        sessions = [_session(ids, data, app, users[ids[1]]) for ids, data in found]
        sessions.sort(key=lambda one: (one.last_update_time, one.user_id, one.id))
        return ListSessionsResponse(sessions=sessions)

    async def _delete(self, app_name: str, user_id: str, session_id: str) -> None:
        if not isinstance(self._cp, ErasesThreads):
            raise NotImplementedError("the store cannot erase threads")

        thread_id = session_thread(app_name, user_id, session_id)

        while (data := await self._load(thread_id, 0)) is not None:
            # The states of the app and the user stay.
            await self._settle(app_name, user_id, thread_id, data)

            with suppress(VersionConflict):
                await self._cp.delete_thread(thread_id, expected_version=data.version)
                return

    async def _append_event(self, session: Session, event: Event) -> Event:
        app_name, user_id = session.app_name, session.user_id
        thread_id = session_thread(app_name, user_id, session.id)
        record, extra = _record(event)
        turn = self._turns.setdefault(thread_id, asyncio.Lock())

        # Tasks that share a session object append one after the other.
        async with turn:
            if await self._was_delivered(thread_id, session, event, record):
                return event

            if _OWED in extra and (data := await self._load(thread_id, 0)) is not None:
                # The event replaces what the session owes, which is applied before.
                await self._settle(app_name, user_id, thread_id, data)

            owed = await self._numbered(app_name, user_id, extra)
            version, is_new = await self._append_what_fits(
                thread_id, session, record, extra
            )
            event = await super().append_event(session=session, event=event)
            session.last_update_time = event.timestamp
            _mark(session, version)

            # What an earlier try stored was applied above, with its own number.
            owed = owed if owed and is_new else self._unpaid.get(thread_id)

            try:
                if owed:
                    self._unpaid[thread_id] = owed
                    await self._apply_shared(
                        app_name, user_id, thread_id, owed, version
                    )
            except CheckpointerError:
                # The event is stored, with this change. The next event applies it, or
                # the next read.
                logger.warning("%s: a shared state waits", thread_id, exc_info=True)

            return event

    async def _append_what_fits(
        self,
        thread_id: str,
        session: Session,
        record: dict[str, Any],
        extra: dict[str, Any],
    ) -> tuple[int, bool]:
        """Store the event as `_append` does, without parts that the store refuses."""
        stored = 0, False

        async def append(events: list[Any]) -> None:
            nonlocal stored
            stored = await self._append(thread_id, session, {"event": events[0]}, extra)

        await append_what_fits(
            append, [record["event"]], partial(log_missing, thread_id)
        )
        return stored

    async def _append(
        self,
        thread_id: str,
        session: Session,
        record: dict[str, Any],
        extra: dict[str, Any],
    ) -> tuple[int, bool]:
        """Store the event, unless an earlier try did.

        Returns the version after the event, and whether this call stored it.
        """
        version = _version_of(session)

        if version is None:
            version, last = await self._last(thread_id)

            if version == 0:
                raise SessionNotFoundError(f"session {session.id[:80]!r} not found")

            if last == record:
                return version, False

            if not _is_at(session, last.get("event", {})):
                raise _stale(session)

        try:
            await append_once(
                self._cp, thread_id, [record], expected_version=version, extra=extra
            )
        except VersionConflict as exc:
            if exc.actual == 0:
                raise SessionNotFoundError(
                    f"session {session.id[:80]!r} not found"
                ) from exc

            if exc.actual == version + 1 and [record] == await read_range(
                self._cp, thread_id, version, exc.actual
            ):
                return exc.actual, False

            raise _stale(session) from exc

        return version + 1, True

    async def _was_delivered(
        self, thread_id: str, session: Session, event: Event, record: dict[str, Any]
    ) -> bool:
        """Return whether the event is stored, at or before the end of the session."""
        if any(
            _record(one)[0] == record for one in session.events if one.id == event.id
        ):
            return True

        version = _version_of(session)
        # The message at position 0 has no event.
        first = 1 if version is None else version - len(session.events)

        if first <= 1:
            return False

        start = max(1, first - _DUPLICATE_WINDOW)
        return record in await read_range(self._cp, thread_id, start, first)

    async def _last(self, thread_id: str) -> tuple[int, dict[str, Any]]:
        """Return the version of the thread and its last message."""
        known = 0

        while version := await self._cp.append(thread_id, []):
            records = await read_range(self._cp, thread_id, version - 1)

            if len(records) == 1:
                return version, records[0]

            if version == known:  # all messages were trimmed
                break

            known = version

        return version, {}

    # The states of apps and users

    async def _numbered(
        self, app_name: str, user_id: str, extra: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Give numbers to the changes of shared states that the extra owes, if any."""
        owed: dict[str, Any] | None = extra.get(_OWED)

        if owed:
            owed["numbers"] = {
                kind: await self._number(thread_id)
                for kind, thread_id in _shared_threads(app_name, user_id).items()
                if owed[kind]
            }

        return owed

    async def _number(self, thread_id: str) -> int:
        """Return the next number of the thread."""
        for tries_left in reversed(range(_TRIES)):
            try:
                return await self._cp.append(thread_id, [{}])
            except BackendUnavailable:
                if not tries_left:
                    raise

        raise AssertionError

    async def _settle(
        self, app_name: str, user_id: str, thread_id: str, data: CheckpointData[Any]
    ) -> None:
        """Apply what the session owes."""
        owed: Any = data.extra.get(_OWED)

        if owed:
            await self._apply_shared(app_name, user_id, thread_id, owed, data.version)

    async def _apply_shared(
        self,
        app_name: str,
        user_id: str,
        thread_id: str,
        owed: Mapping[str, Any],
        version: int,
    ) -> None:
        """Apply the changes of the app's and the user's state, and mark them so.

        ``version`` is that of the session's thread which owes them.
        """
        numbers = owed.get("numbers", {})

        for kind, shared_id in _shared_threads(app_name, user_id).items():
            await self._merge(shared_id, owed[kind], numbers.get(kind, 0))

        # A later event may owe something else. A deleted session owes nothing.
        with suppress(VersionConflict):
            await self._cp.append(
                thread_id, [], expected_version=version, extra={_OWED: None}
            )

        self._unpaid.pop(thread_id, None)

    async def _merge(
        self, thread_id: str, values: Mapping[str, Any], number: int
    ) -> None:
        """Set the keys that have no higher number, in one fenced append."""
        pauses = backoff_pauses(first=0.005, longest=0.5)
        # If the thread is at the number, nothing was applied after it was given.
        version, stored = number, dict[str, Any]()

        while changed := {
            _STATE + key: [number, value]
            for key, value in values.items()
            if stored.get(_STATE + key, [-1])[0] < number
        }:
            by = uuid4().hex[:16]

            try:
                await append_once(
                    self._cp,
                    thread_id,
                    [{"by": by}],
                    expected_version=version,
                    extra=changed,
                )
                return
            except VersionConflict:
                await asyncio.sleep(next(pauses))
                data = await self._load(thread_id, 0)
                version, stored = (data.version, data.extra) if data else (0, {})

    async def _load_wanted(
        self, thread_id: str, config: GetSessionConfig | None
    ) -> CheckpointData[Any] | None:
        """Return the thread with all events that the config asks for."""
        if config is None or config.num_recent_events is not None:
            wanted = None if config is None else config.num_recent_events
            return await self._load(thread_id, wanted)

        if not (after := config.after_timestamp):
            return await self._load(thread_id, None)

        recent = _FIRST_READ

        while True:
            data = await self._load(thread_id, recent)

            if data is None or not _wanted_all(data, after):
                return data

            if len(data.messages) < recent:  # these are all that were not trimmed
                return data

            recent *= 4

    async def _load(
        self, thread_id: str, recent: int | None
    ) -> CheckpointData[Any] | None:
        """Return the thread with its newest messages, at least so many of them."""
        if recent is None or not isinstance(self._cp, ReadsRanges):
            return await self._cp.load(thread_id)

        if recent <= 0:
            return await self._cp.load_range(thread_id, 0, 0)

        return await self._cp.load_range(thread_id, -recent)

    async def _load_listed(
        self, page: Sequence[ThreadInfo]
    ) -> dict[ThreadInfo, CheckpointData[Any] | None]:
        """Return the threads without messages; those that are the same from memory."""
        found = {info: self._listed.get(info) for info in page}
        changed = [info for info, data in found.items() if data is None]
        ids = [info.thread_id for info in changed]
        loaded = await asyncio.gather(*(self._load(one, 0) for one in ids))

        for info, data in zip(changed, loaded, strict=True):
            found[info] = data

            # A list applies what is owed, and later changes are not those of the info.
            if data and data.version == info.version and not data.extra.get(_OWED):
                self._listed[info] = data

        for oldest in [*self._listed][:-_LISTED]:
            del self._listed[oldest]

        return found

    async def _shared_state(self, thread_id: str) -> dict[str, Any]:
        data = await self._load(thread_id, 0)
        changes = {} if data is None else _state_in(data.extra)
        return {key: value for key, (_, value) in changes.items()}


def session_thread(app_name: str, user_id: str, session_id: str) -> str:
    """Return the id of the thread that holds a session.

    Raises ``InvalidId`` for an empty part, or if the id is longer than 512 bytes.
    """
    return _thread(_SESSIONS, app_name, user_id, session_id)


def _thread(prefix: str, *parts: str) -> str:
    for part in parts:
        check_id("app_name, user_id or session_id", part)

    encoded = "/".join(quote(part, safe="") for part in parts)
    return check_id("the ids of the session, with their prefix,", prefix + encoded)


def _shared_threads(app_name: str, user_id: str) -> dict[str, str]:
    """Return the threads of the app's state and the user's."""
    return {
        "app": _thread(_APPS, app_name),
        "user": _thread(_USERS, app_name, user_id),
    }


def _state_in(extra: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key.removeprefix(_STATE): value
        for key, value in extra.items()
        if key.startswith(_STATE)
    }


def _session(
    ids: tuple[str, str, str],
    data: CheckpointData[Any],
    app: dict[str, Any],
    user: dict[str, Any],
) -> Session:
    """Return the session without events; it shares no value with another session."""
    app_name, user_id, session_id = ids
    session = Session(
        app_name=app_name,
        user_id=user_id,
        id=session_id,
        state={
            **copied(_state_in(data.extra)),
            **{f"{State.APP_PREFIX}{key}": copied(app[key]) for key in app},
            **{f"{State.USER_PREFIX}{key}": copied(user[key]) for key in user},
        },
        last_update_time=data.extra.get(_UPDATED, 0.0),
    )
    _mark(session, data.version)
    return session


def _mark(session: Session, version: int) -> None:
    """Note in a session which version of its thread it is.

    Stores of the ADK keep their revision in this attribute too. A copy of the session
    has it.
    """
    session._storage_update_marker = str(version)


def _version_of(session: Session) -> int | None:
    """Return the version of the thread; ``None`` if no service loaded the session."""
    marker = getattr(session, "_storage_update_marker", None)
    return int(marker) if marker is not None and marker.isdecimal() else None


def _is_at(session: Session, last: Mapping[str, Any]) -> bool:
    """Return whether the session ends with the last event of the stored session.

    If the session was loaded without events, compare the times.
    """
    if session.events:
        return bool(session.events[-1].id == last.get("id"))

    return not last or bool(session.last_update_time == last["timestamp"])


def _stale(session: Session) -> StaleSessionError:
    return StaleSessionError(
        f"session {session.id[:80]!r} has events that the given session lacks, or was "
        "made again; get it again"
    )


def _event(thread_id: str, stored: Mapping[str, Any]) -> Event:
    """Return the event; one that this version of the ADK refuses becomes a text."""
    try:
        return Event.model_validate(stored)
    except ValidationError as exc:
        logger.warning("%s: an event cannot be read: %s", thread_id, exc)
        text = placeholder("an event that this version of the ADK cannot read")
        names = ("id", "author", "invocation_id", "timestamp", "branch")
        known = {
            name: stored[name]
            for name in names
            if isinstance(stored.get(name), str | float | int)
        }
        return Event(
            **{"author": "user", **known},
            content=types.Content(role="model", parts=[types.Part(text=text)]),
        )


def _record(event: Event) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the message of an event, and the change of the session's extra."""
    dumped = _json(event.model_dump(exclude_none=True), in_event=True)
    delta = event.actions.state_delta if event.actions else {}
    kept = {
        key: value
        for key, value in delta.items()
        if not key.startswith(State.TEMP_PREFIX)
    }

    if delta:
        dumped["actions"]["state_delta"] = _json(kept)

    return {"event": dumped}, {_UPDATED: event.timestamp, **_changes(kept)}


def _changes(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the change of a session's extra for a change of all states."""
    own: dict[str, Any] = {}
    owed: dict[str, dict[str, Any]] = {"app": {}, "user": {}}

    for key, value in state.items():
        if key.startswith(State.APP_PREFIX):
            owed["app"][key.removeprefix(State.APP_PREFIX)] = _json(value)
        elif key.startswith(State.USER_PREFIX):
            owed["user"][key.removeprefix(State.USER_PREFIX)] = _json(value)
        elif not key.startswith(State.TEMP_PREFIX):
            own[_STATE + key] = _json(value)

    return {**own, _OWED: owed} if owed["app"] or owed["user"] else own


def _json(value: Any, *, in_event: bool = False) -> Any:
    """Return the value as JSON; another object is kept as text, as by the ADK.

    In an event NaN and infinities are null, and bytes are base64, as in the ADK's JSON
    of it. Not in pydantic's JSON mode, which changes or refuses surrogates in keys.
    """
    if isinstance(value, dict):
        return {_key(k): _json(inner, in_event=in_event) for k, inner in value.items()}

    if isinstance(value, (list, tuple)):
        return [_json(inner, in_event=in_event) for inner in value]

    if value is None or isinstance(value, (str, int)):
        return value

    if in_event and isinstance(value, float):
        return value if isfinite(value) else None

    bytes_mode: Literal["base64", "utf8"] = "base64" if in_event else "utf8"
    return to_jsonable_python(value, fallback=str, bytes_mode=bytes_mode)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else next(iter(to_jsonable_python({key: None})))


def _wanted_all(data: CheckpointData[Any], after: float) -> bool:
    """Return whether all events of the data, and maybe earlier ones, are after it."""
    events = (record.get("event", {}) for record in data.messages)
    return all(event.get("timestamp", after) >= after for event in events)


def _wanted(
    records: Sequence[dict[str, Any]], config: GetSessionConfig | None
) -> Sequence[dict[str, Any]]:
    """Return the events that the config asks for."""
    if config is None:
        return records

    if config.num_recent_events is not None:
        records = records[max(0, len(records) - config.num_recent_events) :]

    if config.after_timestamp is not None:
        for place in range(len(records) - 1, -1, -1):
            if records[place]["timestamp"] < config.after_timestamp:
                return records[place + 1 :]

    return records
