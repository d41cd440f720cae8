"""Servers and loops of an endpoint picker: asyncio around the core.

The package contains the ext_proc servicer, health, TLS, the HTTP endpoints, reloading, and the
composition root (`app`) that starts and drains them, which `extproc serve` runs. It must not contain
decisions.
"""
