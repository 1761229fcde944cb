"""Pictures of a session's branches: for the terminal, as Mermaid, as SVG.

Each shows straight runs of entries folded to what a person looks for (where branches
begin and end, what the user said, labels, compactions), unless ``everything`` is asked
for. What entries say is text that somebody else wrote: it is shortened, and never
markup, an escape sequence or code.
"""

from cpkit.sessions.pictures.mermaid import draw_mermaid
from cpkit.sessions.pictures.svg import draw_svg
from cpkit.sessions.pictures.terminal import draw_terminal

__all__ = ["draw_mermaid", "draw_svg", "draw_terminal"]
