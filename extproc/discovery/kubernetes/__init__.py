"""Endpoints, priorities and rewrites from a Kubernetes API server.

Lives here, pure: what is asked for (`settings`), which collections that takes (`collections`,
`resources`), reading of API objects (`objects`, `reading`) and of list pages and watch lines
(`events`), pods and slices to endpoints (`membership`), objectives and rewrites to a policy
(`decrees`), and the caches (`cluster`) with the pools over them (`views`). And the shells: the
official client (`api`, behind the protocol in `answers`), one list and watch (`feed`), and all of
them together (`follow`).
Must not live here: what an endpoint is worth (pool, scrape), which request goes to which pool
(dispatch), a reason to write anything to the API server (what writes shares `api.Server.send`).
Driven by: the server, which runs `follow.Follower` in its task group.
"""
