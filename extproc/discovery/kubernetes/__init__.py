"""Endpoints, priorities and rewrites from a Kubernetes API server.

Lives here, pure: what is asked for (`settings`), which collections that takes (`watch_plan`,
`resources`), reading of API objects (`objects`, `decode`) and of list pages and watch lines
(`watch_events`), pods and slices to endpoints (`pod_endpoints`), objectives and rewrites to a policy
(`decrees`), and the caches (`store`) with the pools over them (`pool_views`). And the shells: the
official client (`api_client`, behind the protocol in `api_errors`), one list and watch (`reflector`), and all of
them together (`controller`).
Must not live here: what an endpoint is worth (pool, scrape), which request goes to which pool
(dispatch), a reason to write anything to the API server (what writes shares `api.Server.send`).
Driven by: the server, which runs `follow.Follower` in its task group.
"""
