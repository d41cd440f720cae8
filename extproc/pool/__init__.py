"""State of the endpoint pool: endpoints, their scraped loads, and our in-flight requests.

`snapshot.Pool` is immutable, and `store.PoolStore` is the only writer that replaces it. The package
also holds the in-flight accounts with their reservations, and `outlier_detection.OutlierDetector`,
which ejects endpoints. Choosing, scraping, discovery and clocks belong to other packages.

Discovery calls `PoolStore.set_endpoints`, the scraper calls `PoolStore.observe` and
`PoolStore.scrape_failed`, and routing reads `PoolStore.pool`, opens reservations and reports
outcomes with `PoolStore.record_outcome`.
"""
