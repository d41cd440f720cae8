"""Discovery of pools, endpoints, objectives and rewrites from a Kubernetes API server.

Contents, without I/O: the pool sources (`settings`), the collections that they require
and the status of each (`watch_plan`), API objects and their decoders (`objects`), errors, list
pages and watch lines (`api_responses`), pods, slices, objectives and rewrites as pools (`pool_views`),
and the caches below these (`store`).
With I/O: the official client (`api_client`), single requests of other components (`request_client`), one
list and watch (`reflector`), and all of them together (`controller`).
Not here: the load of an endpoint (pool, scrape), the choice of a pool for a request (routing), and
writes to the API server (writers share `request_client.ApiRequestClient`).
Caller: the server, which runs `controller.KubernetesDiscovery` in its task group.
"""
