"""The level ``powerloss``: record a writing process, rebuild what a disk may hold.

`recording` runs a writer under strace, and `trace` reads its system calls. `disk` keeps
what is synced and what is not; `states` are what a power loss leaves. `script` is what
the writer does and what must be found. `trial` opens each state and looks.
"""
