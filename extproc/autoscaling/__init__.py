"""How many replicas a scale target should have: demand in, a number and its reason out.

Lives here: what is seen of one target at one moment (`demand`) and how it is measured from counters
(`demand_estimator`, `capacity`), the policies (`policies`, listed in `registry`), and the loop of one target
(`policy_runner`), which keeps every policy within its bounds.
Must not live here: Kubernetes, KEDA, processes, clocks, where state is kept.
Driven by: the shells that act on the number, and the simulator. Time is an argument, monotonic
seconds; state is plain JSON, so that whoever comes next goes on where the last one stopped.
"""
