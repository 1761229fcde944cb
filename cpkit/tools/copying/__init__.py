"""Moving threads between stores, and out into a file and back.

`copy_store` brings what one store has into another; `export_lines` writes it as lines
of JSON, and an `ExportFile` is read from as if it were a store.
"""

from cpkit.tools.copying.calls import Source
from cpkit.tools.copying.copier import copy_store
from cpkit.tools.copying.exports import ExportFile, export_lines
from cpkit.tools.copying.report import CopyReport, Problem

__all__ = [
    "CopyReport",
    "ExportFile",
    "Problem",
    "Source",
    "copy_store",
    "export_lines",
]
