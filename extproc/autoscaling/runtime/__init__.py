"""Runtime of autoscaling: control loops, their inputs, and the actuators.

Lives here: the loops (`autoscaler`, `control_loop`), counters of this process and of its peers
(`demand_counters`), and the actuators (`actuator`): the scale subresource of Kubernetes
(`scale_subresource`), child processes (`process_actuator`), and a program. State that outlives the
process is in a ConfigMap or a file (`state_store`); `keda_scaler` serves KEDA.
Must not live here: the number of replicas (`extproc.autoscaling`), elections
(`extproc.election`).
Driven by: `extproc.server.app`.
"""
