"""The fleet's state: endpoints, their loads, and our own in-flight accounts.

What lives here: the immutable `Pool` snapshot, the one writer that replaces it (`Fleet`), and the
accounts with their tickets. What must not: choosing, scraping, discovery, clocks.
Who drives it: discovery calls `Fleet.replace`, the scraper calls `Fleet.observe`, the dispatcher
reads `Fleet.pool` and opens tickets.
"""
