"""Periodic reading of engine metrics and model lists into endpoint loads.

Contents, without I/O: metric names per engine type (`engines`), the parsers of a metrics page
(`metric_families`, `metrics_page`), and the scrape intervals
(`schedule`). With I/O: the keep-alive client (`client`), the loops, one per endpoint (`scraper`),
model lists and their polling (`model_list`), the subscriptions to KV events
(`kv_event_subscriber`), and the tokens of prompts (`prompt_renderer`).
Not here: the meaning of a load for routing (scheduling), its aging and dead reckoning (pool), its
counting and logging (the server passes the results to telemetry).
Caller: the server, which runs `Scraper.run` in its task group; the loops write to the pool store.
"""
