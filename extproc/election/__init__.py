"""Elects a single leader among replicas with a Lease of Kubernetes.

- Without I/O: the times of an election, client-go's algorithm for a candidate, and the Lease object
  (`lease_state`).
- With I/O: `leader_elector`, which reads and writes the Lease through a `LeaseStore`.

The elector of the official client (`kubernetes.aio.leaderelection`, release 37) is not used: it
counts its time limits with the wall clock, which may jump.

The server runs `LeaderElector` in its task group and provides the store over the API client of
discovery. Readiness and autoscaling read `LeaderElector.is_leader`.
"""
