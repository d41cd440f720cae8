"""Metrics pages to loads: what every engine says of itself, asked again and again.

Lives here: which series of which engine mean what (`engines`), the scanner of one page (`metrics_page`),
the list of models (`models_page`), how often to ask (`schedule`), an HTTP/1.1 answer read from bytes
(`http_response`): all five pure. And the shells: the kept-alive client (`client`), the loops, one per
endpoint (`scraper`), and what they ask beside loads (`model_list_poller`); `needs` says what they use of others.
Must not live here: what a load is worth (scheduling), how it ages and is dead-reckoned (pool), how
it is counted and logged (telemetry reads the facts handed to `on_fact`).
Driven by: the server, which runs `Scraper.run` in its task group; the loops write to the fleet.
"""
