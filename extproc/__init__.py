"""extproc decides, for every HTTP request Envoy shows it, which LLM engine serves it.

The packages form layers; imports go down only (`pyproject.toml`, section import-linter):
cli, then server and sim, config, the shells (discovery, scrape, telemetry, dispatch), then wire,
scheduling and parsing, protocol, pool and prefix, and at the bottom the frozen values decision,
endpoint, request and errors.
"""
