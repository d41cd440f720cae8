"""Endpoint picker for LLM engines: decides which engine serves an HTTP request that Envoy shows it.

The packages form layers, and imports go down only: docs/contributing/architecture.md lists them.

In all of them `now` is monotonic seconds, `clock` returns these, and `rng` is seeded chance; `where`
and `path` name the file or flag of a value, and its place in the file, for errors.
"""
