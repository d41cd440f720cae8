"""The fleet's state: endpoints, their loads, and our own in-flight accounts.

What lives here: the immutable `Pool` snapshot, the one writer that replaces it (`PoolStore`), the
accounts with their tickets, and the `Health` that says who is left out. What must not: choosing,
scraping, discovery, clocks.
Who drives it: discovery calls `PoolStore.set_endpoints`, the scraper calls `PoolStore.observe` and
`PoolStore.scrape_failed`, the dispatcher reads `PoolStore.pool`, opens tickets, and calls `PoolStore.record_outcome` for
what answers say.
"""
