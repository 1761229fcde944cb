"""Bringing conversations into a store from where people have them.

::

    async with open_checkpointer(url) as cp:
        report = await import_from("sessions/", cp)

A source is only read. Each conversation becomes a thread by one append that is fenced,
and what is in the store already is compared first: so an import that is made again
writes what is new and nothing twice, also where the first was interrupted.
"""

from cpkit.tools.importing.detect import KINDS, checked
from cpkit.tools.importing.report import Report, ThreadReport
from cpkit.tools.importing.run import import_from
from cpkit.tools.importing.source import BadSource

__all__ = ["KINDS", "BadSource", "Report", "ThreadReport", "checked", "import_from"]
