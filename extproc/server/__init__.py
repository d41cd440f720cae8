"""The asyncio shells around the core.

What lives here: the ext_proc servicer, health, TLS, the admin pages, the composition root that
starts and drains them. What must not: policy.
Who drives it: `extproc serve`, through `server.app`.
"""
