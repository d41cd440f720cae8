"""Discovery of endpoints from flags, a watched file, DNS and Kubernetes.

Contents, without I/O: the strict parser of endpoint lists (`endpoint_list`). With I/O: the resolver
and the merging of its answers into endpoints (`dns`), and the watched file with the loop that joins them
(`static_discovery`).
Not here: the load or reachability of an endpoint (scrape, pool).
Caller: the server, which runs `StaticDiscovery.run` in its task group; it writes to the pool store.
"""
