"""Routing of a request: parsing, endpoint choice and accounting.

The package contains the `Director`, the synchronous core that the server, the simulator and
`extproc explain` share. It must not contain I/O, clocks, logs or protocol messages. The caller
calls `route`, then `reserve` for a decision it carries out, then `release` exactly once when the
request ends. `route` alone is a dry run.
"""
