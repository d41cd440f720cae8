"""What Envoy is told over xDS: pools as clusters and endpoints, and who holds which version.

What lives here: the resources of a pool, their bytes in Envoy's own types, and the two
conversations of aggregated discovery (whole state, and differences) as state machines. What must
not: streams, tasks and clocks, which are the server's; choosing endpoints.
Who drives it: the xDS shell of the server, with the pools of the fleets. It is a room of its own,
beside telemetry, because it only reads pools: nothing that routes a request knows it is there.
"""
