"""Autoscaling policies: demand of a scale target in, desired replicas and a reason out.

The package contains the demand of a target (`interface`) and its estimation from counters of all replicas of
the endpoint picker (`demand_estimator`), the policies (`policies`), the step of a single target (`interface`),
which keeps every policy within its bounds, and the history of a target (`scaling_history`), which server,
simulator and plots share.
It must not contain Kubernetes, KEDA, processes, clocks or storage of state.
`extproc.autoscaling.runtime` and the simulator drive it. Time is an argument in monotonic
seconds; state is plain JSON, so that another process can continue from it.
"""
