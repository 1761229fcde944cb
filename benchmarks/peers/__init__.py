"""Other people's stores, each used as its own documentation says.

One append is the least that keeps a message: for LangGraph one `aput` of the whole
state (a graph's run also puts writes), and with its delta channel the writes and the
checkpoint without the channel, or with all of it at each hundredth time. What their
interfaces ask for in memory beside it, the state of a graph, is theirs to keep.
"""
