"""Compares extproc with llm-d's endpoint picker in Go, behind one Envoy. `make bench-peers` runs it."""
