"""The driver kit: what the author of a backend builds with.

A backend is a `Store`: it keeps bytes. A `Handle` in front of it gives users the
checkpointer. `docs/write-a-backend.md` is the tutorial.
"""

from cpkit.driver.abilities import FullHandle as FullHandle
from cpkit.driver.abilities import SearchingHandle as SearchingHandle
from cpkit.driver.abilities import handle_over as handle_over
from cpkit.driver.backoff import backoff_pauses as backoff_pauses
from cpkit.driver.codec import Codec as Codec
from cpkit.driver.codec import decode_rows as decode_rows
from cpkit.driver.codec import from_micros as from_micros
from cpkit.driver.codec import to_micros as to_micros
from cpkit.driver.file_systems import FileSystem as FileSystem
from cpkit.driver.file_systems import create_folder as create_folder
from cpkit.driver.file_systems import file_system as file_system
from cpkit.driver.file_systems import sync_folder as sync_folder
from cpkit.driver.file_systems import warn_once as warn_once
from cpkit.driver.handle import Handle as Handle
from cpkit.driver.ids import check_id as check_id
from cpkit.driver.ids import check_page as check_page
from cpkit.driver.ids import prefix_end as prefix_end
from cpkit.driver.ids import span as span
from cpkit.driver.key_value import KeyValueStore as KeyValueStore
from cpkit.driver.key_value import View as View
from cpkit.driver.notices import listen_in_thread as listen_in_thread
from cpkit.driver.store import AnnouncesChanges as AnnouncesChanges
from cpkit.driver.store import Decode as Decode
from cpkit.driver.store import DriverOptions as DriverOptions
from cpkit.driver.store import Findings as Findings
from cpkit.driver.store import Heard as Heard
from cpkit.driver.store import Limits as Limits
from cpkit.driver.store import ListensForChanges as ListensForChanges
from cpkit.driver.store import SearchesMessages as SearchesMessages
from cpkit.driver.store import ServerOptions as ServerOptions
from cpkit.driver.store import Store as Store
from cpkit.driver.store import StoreDriver as StoreDriver
from cpkit.driver.store import StoreInfo as StoreInfo
from cpkit.driver.store import StoresDumps as StoresDumps
from cpkit.driver.store import StoresMarkers as StoresMarkers
from cpkit.driver.store import StoresReceipts as StoresReceipts
from cpkit.driver.store import StoresThreadLists as StoresThreadLists
from cpkit.driver.store_calls import is_late as is_late
from cpkit.driver.writes import Append as Append
from cpkit.driver.writes import Claim as Claim
from cpkit.driver.writes import Conflict as Conflict
from cpkit.driver.writes import Erase as Erase
from cpkit.driver.writes import EraseCalls as EraseCalls
from cpkit.driver.writes import Fate as Fate
from cpkit.driver.writes import KeyHeld as KeyHeld
from cpkit.driver.writes import Merge as Merge
from cpkit.driver.writes import Outcome as Outcome
from cpkit.driver.writes import Resolve as Resolve
from cpkit.driver.writes import Restore as Restore
from cpkit.driver.writes import Snapshot as Snapshot
from cpkit.driver.writes import StoredCall as StoredCall
from cpkit.driver.writes import StoredDump as StoredDump
from cpkit.driver.writes import StoreFailure as StoreFailure
from cpkit.driver.writes import Trim as Trim
from cpkit.driver.writes import Write as Write
from cpkit.driver.writes import erased_call as erased_call
from cpkit.driver.writes import is_erased_by as is_erased_by
from cpkit.driver.writes import issued_call as issued_call
from cpkit.driver.writes import key_is_held as key_is_held
from cpkit.driver.writes import may_have_changed as may_have_changed
from cpkit.driver.writes import resolved_call as resolved_call
