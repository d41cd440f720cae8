"""Routing of a request: parsing, endpoint choice and accounting.

What lives here: the `Director`, the synchronous heart that the servers, the simulator and
`extproc explain` share. What must not: I/O, clocks, logs, protocol messages.
Who drives it: a shell calls `route`, then `commit` for a decision it acts on, then `complete`
exactly once when the request is over. `route` alone is a dry run.
"""
