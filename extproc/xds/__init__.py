"""xDS resources of pools as clusters and endpoints, and the ADS session state per stream.

Contents: the resources of a pool (`resources`), the encoded snapshot of all pools
(`snapshot_cache`), and the sessions of aggregated discovery with their messages (`sessions`) as state
machines. Not here: streams, tasks and clocks, which belong to the server; the choice of endpoints.
Caller: the xDS service of the server, with the pools of the stores. The package only reads pools;
no module on the path of a request imports it.
"""
