"""Endpoint picker for LLM engines: chooses the engine of each HTTP request that Envoy shows.

The packages form layers, and imports go down only: docs/contributing/architecture.md lists them.

In all of them `now` is monotonic seconds, `clock` returns these, and `rng` is seeded chance; `where`
and `path` name the file or flag of a value, and its place in the file, for errors. Names of `headers`
are in lower case. A `chain` has the block hashes of a prompt, 64 bits each, root first, and `blocks` of a
request are one. `model` may be the name of an adapter.
"""
