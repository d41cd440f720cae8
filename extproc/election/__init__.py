"""Which of several replicas does what only one may do, told by a Lease of Kubernetes.

Lives here, pure: how patient candidates are (`settings`), client-go's algorithm for one candidate
(`lease_state`) and the Lease object (`lease`). And the shell that asks and writes (`leader_elector`), over
whoever can reach the API server.
Must not live here: how the API server is reached (server, with the client of discovery), what
leading is good for (server: readiness; whatever else must be single asks `LeaderElector.is_leader`).
Driven by: the server, which runs `elector.Elector` in its task group.
"""
