"""Facts to numbers and log lines.

What lives here: plain tallies the shells add to, their Prometheus exposition, and the log set-up.
What must not: deciding anything; prompts, bodies or header values.
Who drives it: the servicer and the scraper add facts; the admin server renders them.
"""
