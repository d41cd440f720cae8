"""Flow control: bounded request queue with priorities, fairness and deadlines.

The package contains all decisions about queueing (`controller`), the request headers that it reads
(`request_headers`), the queue of a pool (`queue`), its priority bands (`priority_band`) and the turns
of tenants in them (`fair_share`), rate limits (`rate_limit`), and the drain rate (`drain_rate`). It
must not contain the definition of capacity (see `routing`), clocks, futures, streams or bodies. The
server and the simulator drive it. Time is an argument; the driver chooses the type of a request.
"""
