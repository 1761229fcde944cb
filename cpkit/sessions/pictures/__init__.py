"""Pictures of a session's branches: for the terminal, as Mermaid and as SVG.

Unless ``everything`` is true, a picture shows the entries that a person looks for: the
ends of branches, the user's messages, labels and compactions. Runs of other entries are
folded into one line. The text of entries is untrusted: it is shortened, and can never
become markup, an escape sequence or code.
"""

from cpkit.sessions.pictures.mermaid import draw_mermaid
from cpkit.sessions.pictures.svg import draw_svg
from cpkit.sessions.pictures.terminal import draw_terminal

__all__ = ["draw_mermaid", "draw_svg", "draw_terminal"]
