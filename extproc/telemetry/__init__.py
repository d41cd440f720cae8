"""Counters, metrics, explanations and log lines about routing decisions.

Contents: plain counters, their Prometheus exposition, explanations of decisions, and the ring of
recent decisions. Not here: any routing decision; prompts, bodies or header values.
Caller: the servicer and the scraper add facts; the admin server renders them.
"""
