"""Stores of other projects, each used as its documentation says.

One append is the least work that keeps a message. For LangGraph it is one `aput` of the
whole state (a run of a graph also puts writes). With its delta channel it is the writes
and a checkpoint without the channel, or with the whole channel at each hundredth
append. State that an interface needs in memory is kept by the contender.
"""
