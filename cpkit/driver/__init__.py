"""The driver kit: what the author of a backend builds with.

A backend is a `Store`: it keeps bytes. A `Handle` in front of it gives users the
checkpointer. `docs/write-a-backend.md` is the tutorial.
"""

from cpkit.driver.abilities import FullHandle, handle_over
from cpkit.driver.backoff import backoff_pauses
from cpkit.driver.codec import Codec, decode_rows, from_micros, to_micros
from cpkit.driver.file_systems import (
    FileSystem,
    create_folder,
    file_system,
    sync_folder,
    warn_once,
)
from cpkit.driver.handle import Handle
from cpkit.driver.ids import check_id, check_page, prefix_end, span
from cpkit.driver.notices import listen_in_thread
from cpkit.driver.store import (
    AnnouncesChanges,
    Decode,
    DriverOptions,
    Findings,
    Heard,
    Limits,
    ListensForChanges,
    ServerOptions,
    Store,
    StoreDriver,
    StoreInfo,
    StoresDumps,
    StoresMarkers,
    StoresReceipts,
    StoresThreadLists,
)
from cpkit.driver.store_calls import is_late
from cpkit.driver.writes import (
    Append,
    Claim,
    Conflict,
    Erase,
    KeyHeld,
    Merge,
    Outcome,
    Resolve,
    Restore,
    Snapshot,
    StoredCall,
    StoredDump,
    StoreFailure,
    Write,
    erased_call,
    issued_call,
    key_is_held,
    may_have_changed,
    resolved_call,
)

__all__ = [
    "AnnouncesChanges",
    "Append",
    "Claim",
    "Codec",
    "Conflict",
    "Decode",
    "DriverOptions",
    "Erase",
    "FileSystem",
    "Findings",
    "FullHandle",
    "Handle",
    "Heard",
    "KeyHeld",
    "Limits",
    "ListensForChanges",
    "Merge",
    "Outcome",
    "Resolve",
    "Restore",
    "ServerOptions",
    "Snapshot",
    "Store",
    "StoreDriver",
    "StoreFailure",
    "StoreInfo",
    "StoredCall",
    "StoredDump",
    "StoresDumps",
    "StoresMarkers",
    "StoresReceipts",
    "StoresThreadLists",
    "Write",
    "backoff_pauses",
    "check_id",
    "check_page",
    "create_folder",
    "decode_rows",
    "erased_call",
    "file_system",
    "from_micros",
    "handle_over",
    "is_late",
    "issued_call",
    "key_is_held",
    "listen_in_thread",
    "may_have_changed",
    "prefix_end",
    "resolved_call",
    "span",
    "sync_folder",
    "to_micros",
    "warn_once",
]
