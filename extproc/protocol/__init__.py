"""Protocol: one HTTP exchange as seen through one ext_proc stream.

What lives here: events (what the data plane says), replies (what we say), the table of
transitions, and the `Exchange` that walks it. What must not: bytes on the wire (that is `wire`),
choosing (that is `dispatch`), clocks, tasks, logs.
Who drives it: the servicer feeds `Exchange.receive`, asks the dispatcher when the exchange has a
request pending, and gives the outcome to `Exchange.resolve`.
"""
