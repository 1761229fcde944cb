"""Move threads between stores, and into a file and back.

`copy_store` copies every thread of a store into another store. `export_lines` writes
threads as lines of JSON, and an `ExportFile` is a source to copy from.
"""

from cpkit.tools.copying.copier import Destination, copy_store
from cpkit.tools.copying.exports import ExportFile, Source, export_lines
from cpkit.tools.copying.report import CopyReport, Problem

__all__ = [
    "CopyReport",
    "Destination",
    "ExportFile",
    "Problem",
    "Source",
    "copy_store",
    "export_lines",
]
