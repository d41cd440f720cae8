"""Prefix cache prediction: the leading blocks of a prompt that each endpoint holds.

`blocks` cuts a prompt into chained block hashes, `index` maps blocks to endpoints in a radix tree,
and `radix_tree` is the bounded part of that tree that one endpoint holds. `cache_model` sizes these
parts by the capacity of the engine and by its hit counters.

The value of a match belongs to scheduling, the time to record a request to routing, and reading
the counters of an engine to scrape. Routing calls `chain`, `match`, and after the pick
`record_sent`. Nothing here waits, reads a clock or draws chance; everything runs on one thread.
"""
