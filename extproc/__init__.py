"""Endpoint picker for LLM engines: decides which engine serves an HTTP request that Envoy shows it.

The packages form layers, and imports go down only (`pyproject.toml`, section import-linter; drawn in
docs/contributing/architecture.md): cli; demo; server, simulator and testing; config; discovery,
scrape, telemetry, routing, xds, election, flow_control and autoscaling; supervision; wire, scheduling
and parsing; protocol, pool and prefix_cache; decision, endpoint, request and errors.

In all of them `now` is monotonic seconds, `clock` returns these, and `rng` is seeded chance.
"""
