"""The shells that scale: the loop of every pool, what it reads, and the hands that act.

Lives here: the loops and who starts them (`autoscaler`, `scaled`, `loop`), what a picker counts
(`counting`), what others count (`peers`), and those who act (`hands`): Kubernetes (`kubernetes`,
with `objects` for what it says and `rivals` for who else scales), child processes (`launch`), a
program (`hook`). What outlives us is kept in a ConfigMap (`memory`); KEDA asks and listens to
`keda`.
Must not live here: how many replicas there should be (`extproc.autoscaling`), elections
(`extproc.election`).
Driven by: `extproc.server.app`.
"""
