"""Importing conversations of other programs into a store.

::

    async with open_checkpointer(url) as cp:
        report = await import_from("sessions/", cp)

A source is only read. Each conversation becomes a thread by one fenced append, after a
comparison with what the store has. A repeated import writes what is new and nothing
twice, even if an earlier import was interrupted.
"""

from cpkit.tools.importing.detect import KINDS, checked
from cpkit.tools.importing.report import Report, ThreadReport
from cpkit.tools.importing.run import import_from
from cpkit.tools.importing.source import BadSource

__all__ = ["KINDS", "BadSource", "Report", "ThreadReport", "checked", "import_from"]
