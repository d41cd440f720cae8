"""Flow control: bounded request queue with priorities, fairness and deadlines.

Lives here: all decisions about waiting (`turnstile`), what requests say of how they wait (`manners`),
the queue of one pool (`queue`), its bands of priority (`band`) and the turns of tenants in them
(`turns`), what tenants may take (`allowance`), and how long it will take (`estimate`).
Must not live here: what capacity is (dispatch), clocks, futures, streams, bodies.
Driven by: the server, which awaits, and the simulator. Time is an argument; a waiter is whatever the
driver makes of it.
"""
