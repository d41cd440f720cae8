"""Diagnostics of an installation: pages of Envoy, extproc and engines in, findings out.

`collector` reads the pages, within limits of time and size. The other modules are pure: each judges
what a kind of server says of itself.
"""
