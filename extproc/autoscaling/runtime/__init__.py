"""The shells that scale: the loop of every pool, what it reads, and the hands that act.

Lives here: the loops and who starts them (`autoscaler`, `scaled_pool`, `control_loop`), what a picker counts
(`demand_counters`), what others count (`peer_counters`), and those who act (`actuator`): Kubernetes (`scale_subresource`,
with `scale_objects` for what it says and `competing_autoscalers` for who else scales), child processes (`process_actuator`), a
program (`exec_actuator`). What outlives us is kept in a ConfigMap (`state_store`); KEDA asks and listens to
`keda_scaler`.
Must not live here: how many replicas there should be (`extproc.autoscaling`), elections
(`extproc.election`).
Driven by: `extproc.server.app`.
"""
