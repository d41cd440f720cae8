"""The fleet's state: endpoints, their loads, and our own in-flight accounts.

What lives here: the immutable `Pool` snapshot, the one writer that replaces it (`Fleet`), the
accounts with their tickets, and the `Health` that says who is left out. What must not: choosing,
scraping, discovery, clocks.
Who drives it: discovery calls `Fleet.replace`, the scraper calls `Fleet.observe` and
`Fleet.scrape_failed`, the dispatcher reads `Fleet.pool`, opens tickets, and calls `Fleet.told` for
what answers say.
"""
