"""Close the tool calls that a crash left without a result in a conversation.

::

    report = await heal(cp, "thread-1")

Model providers refuse a history with a tool call that has no result. `heal` appends the
missing results: the recorded result of the call's effect if the ledger has one, and
otherwise a result that says that the call was interrupted.
"""

from cpkit.heal.closing import Closed, HealReport, Left, heal, result_text

__all__ = ["Closed", "HealReport", "Left", "heal", "result_text"]
