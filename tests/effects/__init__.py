"""Side effects happen once: the ledger, approvals, tools, resume and the lease."""
