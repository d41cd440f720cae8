"""Protocol: one HTTP exchange as seen through one ext_proc stream.

The package contains the messages from Envoy, the replies to Envoy, the table of transitions, and the
`Exchange` that applies it. It must not contain encoding (see `wire`), endpoint choice (see
`routing`), clocks, tasks or logs. The servicer feeds `Exchange.receive`, calls the director when the
exchange has a pending request, and passes the outcome to `Exchange.apply_outcome`.
"""
