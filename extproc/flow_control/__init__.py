"""Flow control: bounded request queue with priorities, fairness and deadlines.

Lives here: all decisions about waiting (`controller`), what requests say of how they wait (`request_headers`),
the queue of one pool (`queue`), its bands of priority (`priority_band`) and the turns of tenants in them
(`fair_share`), what tenants may take (`rate_limit`), and how long it will take (`drain_rate`).
Must not live here: what capacity is (dispatch), clocks, futures, streams, bodies.
Driven by: the server, which awaits, and the simulator. Time is an argument; a waiter is whatever the
driver makes of it.
"""
