"""Flow control: bounded request queue with priorities, fairness and deadlines.

The package contains all decisions about queueing (`controller`), the queue of a pool (`queue`), its
priority bands with the turns of tenants (`priority_band`), their flow queues (`flow_queue`), and rate
limits (`rate_limit`). It must not contain the definition of capacity (see `routing`), clocks, futures,
streams or bodies. The server and the simulator drive it. Time is an argument; the driver chooses the
type of a request, and reads the headers of a request (`EnqueueRequest`).
"""
