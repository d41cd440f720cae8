"""Discovery of endpoints from flags, a watched file, DNS and Kubernetes.

Contents, without I/O: the strict parser of endpoint lists (`endpoint_list`). With I/O: the watched
file, the resolver of host names, and the loop that merges them into endpoints (`static_discovery`).
Not here: the load or reachability of an endpoint (scrape, pool).
Caller: the server, which runs `StaticDiscovery.run` in its task group; it writes to the pool store.
"""
