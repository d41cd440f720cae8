"""Scheduling: plugins and profiles that choose among candidates, and record the reasons.

`framework` has the plugin interfaces; the plugins are in `pickers` and in a module for each concept, with
its filters, scorers and costs; `profile` runs Filter, Score and Pick; `registry` is the table of all plugin
kinds, and of the profiles that a strategy names.

A filter answers a yes-or-no question for each candidate and keeps the order. A scorer judges one thing from
0 to 1, higher is better; how much that thing matters is the profile's business. What is unknown scores like
the mean of what is known. Plugins do not know each other, but for filters that run others (`filter_tree`).

Not here: where candidates come from and what happens after the pick (routing), reading YAML
(config), counting (telemetry). `routing.scheduler` calls a profile with a context and the candidates
of one pool snapshot. Nothing here waits or reads a clock; chance comes with the context.

A new scorer is a class in the module of its concept, a line in `registry` and a case file in the tests.
"""
